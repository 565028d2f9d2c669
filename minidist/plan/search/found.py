"""What a search finds: layouts that fit, with their seconds and bytes."""

from collections.abc import Mapping
from dataclasses import dataclass

from minidist.plan.memory import GB
from minidist.plan.parts.layer import Seconds
from minidist.plan.run import Setup


@dataclass(frozen=True)
class Found:
    """A layout that fits: where its step's seconds go, and the bytes of its fullest GPU by
    category.
    """

    run: Setup
    step: Seconds
    bytes: dict[str, float]

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.step.values())

    @property
    def held(self) -> str:
        """Say what the fullest GPU holds, and what most of it is."""
        return in_words(self.bytes)


@dataclass(frozen=True)
class Answer:
    """The layouts that fit, best first, and how many were refused for each reason.

    The first were timed on a clock: a few of each group, so that layouts which differ are among
    them. `asked` is the batch that was asked for. Where another is planned, `saved` is the share of
    the GPU hours a token that it saves: 1 if no layout fits the batch that was asked for. `missed` is
    the fastest of those that memory nearly has room for, if it is faster than what is found.
    """

    found: tuple[Found, ...]
    refused: Mapping[str, int]
    asked: int
    saved: float = 0.0
    missed: Found | None = None

    @property
    def another_batch(self) -> str:
        """Say which batch is planned in place of the one that was asked for; nothing if none is."""
        planned = self.found[0].run.batch
        if planned == self.asked:
            return ""
        why = "no layout divides the other and fits"
        if self.saved < 1:
            why = (
                f"it takes {self.saved:.0%} fewer GPU hours a token, because more layouts divide it"
            )
        return f"{self.asked:,} sequences a step were asked for, and {planned:,} are planned: {why}"

    def groups(self) -> list[list[Found]]:
        """Return the layouts that have equal axes and shards as one list, best first.

        The best list first.
        """
        groups: dict[tuple[int, ...], list[Found]] = {}
        for each in self.found:
            groups.setdefault(shares(each.run), []).append(each)
        return list(groups.values())


def in_words(bytes: Mapping[str, float]) -> str:
    """Say how many bytes a GPU holds, and what most of them are."""
    most = max(bytes, key=lambda kind: bytes[kind])
    total = sum(bytes.values())
    return f"{total / GB:,.0f} GB a GPU, of which {bytes[most] / GB:,.0f} are {most}"


def shares(run: Setup) -> tuple[int, ...]:
    """Return what makes two layouts differ: how many ranks share what.

    The rest, such as an order, are variants.
    """
    return run.tp, run.pp, run.cp, run.ep, run.dp, run.zero, run.hsdp
