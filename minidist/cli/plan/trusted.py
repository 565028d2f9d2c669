"""How far an answer of `plan` can be trusted, in words: ranges, layouts that are equal, and how much
longer published runs took.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any

from minidist.plan.run import Setup
from minidist.plan.search import Found
from minidist.plan.trust.kinds import kind_of, range_of, ranks, said_of
from minidist.plan.trust.runs import shares


def range_words(found: Found) -> str:
    """Return where the seconds of a step may lie."""
    around = range_around(found.run, found.seconds)
    return f"{around[0]:,.2f} to {around[1]:,.2f} s" if around else "not known"


def range_around(run: Setup, seconds: float) -> tuple[float, float] | None:
    """Return where seconds, or whatever grows with them, may lie; None if that is not known."""
    known = range_of(run)
    return known.around(seconds) if known else None


def ranks_of(shown: Sequence[Found]) -> list[int]:
    """Return the rank of each layout; equal ones have the same."""
    return ranks(shown[0].run, [each.seconds for each in shown])


def equal(shown: Sequence[Found]) -> str:
    """Say which of the layouts are as good as the first, as far as is known."""
    same = [place for place, rank in enumerate(ranks_of(shown), start=1) if rank == 1]
    if len(same) == 1:
        return ""
    *most, last = map(str, same)
    return (
        f"equal: {', '.join(most)} and {last} have rank 1, because their ranges overlap; nothing "
        "published tells them apart, so choose what is simplest"
    )


def trusted(shown: Sequence[Found]) -> str:
    """Say what is known of runs of this kind, and which layouts are equal."""
    return "\n".join(line for line in (said_of(shown[0].run), equal(shown)) if line)


def optimism(goodput: float, mtbf: float) -> str:
    """Say what share of the GPU hours of published runs is planned for them, and what failures leave
    of the time if somebody asked (`mtbf` hours between two).
    """
    (least, middle, most), (least_now, middle_now, most_now) = optimism_tree().values()
    said = (
        f"an optimist's lower bound: {len(shares('planned'))} published runs, planned as they were run, "
        f"get {least:.2f} to {most:.2f} of the GPU hours that they really took (median {middle:.2f}), "
        f"and in the best layout of today {least_now:.2f} to {most_now:.2f} (median {middle_now:.2f}; "
        "docs/as-published.md)"
    )
    if mtbf:
        said += f"; with a failure every {mtbf:,.1f} h goodput is {goodput:.1%}, counted above"
    return said


def trust_tree(shown: Sequence[Found]) -> dict[str, Any]:
    """Return the same for programs."""
    run = shown[0].run
    known = {quantity: range_of(run, quantity) for quantity in ("time", "memory")}
    return {
        "kind": kind_of(run),
        "said": said_of(run),
        "equal": equal(shown),
        **{quantity: each._asdict() if each else None for quantity, each in known.items()},
    }


def optimism_tree() -> dict[str, list[float]]:
    """Return the least, median and largest share of published GPU hours that is planned: as the runs
    were, and today.
    """
    found = {}
    for of in ("planned", "today"):
        values = shares(of)
        found[of] = [values[0], median(values), values[-1]]
    return found
