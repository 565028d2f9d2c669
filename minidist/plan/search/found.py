"""What a search finds: layouts that fit, with their seconds and bytes."""

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Answer:
    """The layouts that fit, best first, and how many were refused for each reason.

    The first were timed on a clock: a few of each group, so that layouts which differ are among
    them.
    """

    found: tuple[Found, ...]
    refused: Mapping[str, int]

    def groups(self) -> list[list[Found]]:
        """Return the layouts that have equal axes and shards as one list, best first.

        The best list first.
        """
        groups: dict[tuple[int, ...], list[Found]] = {}
        for each in self.found:
            groups.setdefault(shares(each.run), []).append(each)
        return list(groups.values())


def shares(run: Setup) -> tuple[int, ...]:
    """Return what makes two layouts differ: how many ranks share what.

    The rest, such as an order, are variants.
    """
    return run.tp, run.pp, run.cp, run.ep, run.dp, run.zero, run.hsdp
