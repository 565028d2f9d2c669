"""How far off an answer may be: errors of published runs of the same kind.

    hopper, dense, 16 bits        a kind: generation of the devices, experts or none, bits of products
    0.93 to 1.09                  four of five rows of it took so many times the seconds that are predicted

The range of an answer is its seconds times that. Two layouts whose ranges overlap are equal, as far as
is known; a layout's `rank` counts those that are faster by more than that. Where no row, or too few,
are of a kind, there is no range, and the answer says so.

`errors.json` has the ranges; `tests/plan/published/proof.py` writes it from files of published rows.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from minidist.plan.run import Setup
from minidist.plan.search import Found

FILE = Path(__file__).with_name("errors.json")
LEAST = 5  # rows of a kind, from which there is a range
BITS = {"bf16": "16 bits", "nvfp4": "4 bits"}  # of products; 8 in any other precision
SHARE = "four of five"  # rows are inside their range


class Range(NamedTuple):
    """What rows of a kind took, as a multiple of what was predicted for them.

    There are no `low` and `high` (0) where there are too few `rows`. `mean` is that of |error|, and
    `bias` that of the error, in percent; `sources` published the rows.
    """

    rows: int
    sources: int
    low: float
    high: float
    mean: float
    bias: float


def kind_of(run: Setup) -> str:
    """Return the kind of a run, which rows may share."""
    model = "experts" if run.model.experts else "dense"
    bits = "autocast" if run.autocast else BITS.get(run.precision, "8 bits")
    sites = ", two sites" if run.machine.slower else ""
    return f"{run.machine.device.generation}, {model}, {bits}{sites}"


@cache
def errors() -> dict[str, Any]:
    """Return the table that `measure.py` wrote."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def range_of(run: Setup, quantity: str = "time") -> Range | None:
    """Return what rows of the same kind took, or held; None if there are none."""
    found = errors()["kinds"].get(kind_of(run), {}).get(quantity)
    return Range(**found) if found else None


def range_around(run: Setup, seconds: float) -> tuple[float, float] | None:
    """Return where seconds, or whatever grows with them, may lie; None if that is not known."""
    known = range_of(run)
    return (seconds * known.low, seconds * known.high) if known and known.low else None


def range_words(found: Found) -> str:
    """Return where the seconds of a step may lie."""
    around = range_around(found.run, found.seconds)
    return f"{around[0]:,.2f} to {around[1]:,.2f} s" if around else "not known"


def ranks_of(shown: Sequence[Found]) -> list[int]:
    """Return the rank of each layout of a run: one more than there are layouts whose range lies below
    its own.
    """
    low, high = range_around(shown[0].run, 1.0) or (1.0, 1.0)
    seconds = [each.seconds for each in shown]
    return [1 + sum(other * high < own * low for other in seconds) for own in seconds]


def said_of(run: Setup) -> str:
    """Say in a sentence what is known of such runs."""
    kind, time, memory = kind_of(run), range_of(run), range_of(run, "memory")
    if time is None:
        generation = f"{run.machine.device.generation},"
        near = [other for other in errors()["kinds"] if other.startswith(generation)]
        return (
            f"never checked on such a machine: no published row is of the kind '{kind}'"
            + (f" (there are rows of {'; '.join(near)})" if near else "")
            + ". No range is known, and the order of layouts is that of the prediction alone"
        )
    if not time.low:
        rows = "one published row is" if time.rows == 1 else f"{time.rows} published rows are"
        return (
            f"hardly checked on such a machine: only {rows} of the kind '{kind}' (mean |error| "
            f"{time.mean:.0f} %), too few for a range"
        )
    said = (
        f"ranges: {SHARE} of {time.rows} published rows ({kind}; {time.sources} sources) took "
        f"{time.low:.2f} to {time.high:.2f} times the predicted seconds"
    )
    if memory and memory.low:
        said += f", and of {memory.rows} held {memory.low:.2f} to {memory.high:.2f} times the bytes"
    else:
        said += "; what they held was never checked"
    return said


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
