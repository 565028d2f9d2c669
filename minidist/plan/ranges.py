"""What each number of a plan may be: one table, by which files, flags and published rows are read.

    MODEL       sizes of a model            DEVICE, MACHINE     what computes, in SI units
    COMMAND     flags of `plan`

A value outside its range is a slip in nearly every case: a peak of 312 is in TFLOP/s, a memory of 80 in GB. What it
would give is a plan with a negative price or more than the peak, so it is refused with a sentence.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from minidist.comm.job.number import Limit, one_of, shown
from minidist.trainer.files import FileError, flatten, retold, typed

Ranges: TypeAlias = Mapping[str, tuple[Any, Limit | None]]
"""By name: the type, a key of `trainer.files.WORDS`, and what a value of it may be."""


def between(low: float, high: float, unit: str = "") -> Limit:
    """Limit a number to what lies between two others, which may be reached."""
    return Limit(f"from {low:,} to {high:,}{unit}", lambda value: low <= value <= high)


SIZE, NONE_OR_SIZE, COUNT = between(1, 10**7), between(0, 10**7), between(1, 10**6)
SHARE = Limit("above 0 and at most 1", lambda value: 0 < value <= 1)
DOLLARS = between(0, 10**6, " $")
GENERATIONS = ("volta", "ampere", "hopper", "blackwell", "tpu", "other")

MODEL: Ranges = {
    "layers": (int, between(1, 10**4)),
    "hidden": (int, SIZE),
    "heads": (int, SIZE),
    "vocabulary": (int, SIZE),
    "kv": (int, NONE_OR_SIZE),
    "ffn": (int, NONE_OR_SIZE),
    "head_dim": (int, NONE_OR_SIZE),
    "gated": (bool, None),
    "tied": (bool, None),
    "experts": (int, NONE_OR_SIZE),
    "top_k": (int, NONE_OR_SIZE),
    "shared": (int, NONE_OR_SIZE),
    "parallel": (bool, None),
    "dropout": (bool, None),
    "window": (int, between(0, 10**9)),
}
DEVICE: Ranges = {
    "name": (str, None),
    "peak": (float, between(10**9, 10**18, " FLOP/s")),
    "peak8": (float, between(10**9, 10**18, " FLOP/s")),
    "reached": (float, SHARE),
    "memory": (float, between(10**8, 10**14, " bytes")),
    "bandwidth": (float, between(10**8, 10**16, " bytes/s")),
    "units": (int, COUNT),
    "link": (float, between(10**6, 10**15, " bytes/s")),
    "flash": (float, SHARE),
    "watts": (float, between(0, 10**5, " W")),
    "generation": (str, one_of(*GENERATIONS)),
}
MACHINE: Ranges = {
    "name": (str, None),
    "gpus": (int, COUNT),
    "node": (int, COUNT),
    "across": (float, between(10**6, 10**16, " bytes/s")),
    "price": (float, DOLLARS),
    "inside": (float, between(10**6, 10**15, " bytes/s")),
}
THIN = between(10**3, 10**16, " bytes/s")
COMMAND: Ranges = {
    "tokens": (float, between(1, 10**18)),
    "batch": (float, between(1, 10**15, " tokens")),
    "sequence": (int, between(1, 10**9, " tokens")),
    "top": (int, COUNT),
    "price": (float, DOLLARS),
    "grid": (float, between(0, 10**5, " g")),
    "mtbf": (float, Limit("0, or from 0.01 to 1e9 hours", lambda value: value == 0 or 0.01 <= value <= 1e9)),
}


def checked(values: Mapping[str, Any], ranges: Ranges, needed: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return values by their names, each of its type and inside its range.

    Raises
    ------
    FileError
        For an unknown name, a missing one of those that are `needed`, or a wrong value.
    """
    flat = flatten(dict(values), {name: kind for name, (kind, _) in ranges.items()})
    if missing := sorted(needed - set(flat)):
        raise FileError(f"does not say {', '.join(missing)}: give {', '.join(ranges)}")
    for key, value in values.items():
        name = key.replace("-", "_")
        with retold(FileError, ValueError, before=f"has {name} = {shown(value)}, which "):
            typed(value, *ranges[name])
    return flat
