"""What a layout may be: the values that each field is given, and those that a user may fix."""

from collections.abc import Mapping
from itertools import permutations
from typing import Any

from minidist.full.launch.parser import nearest
from minidist.full.mesh import AXES
from minidist.full.pipeline.schedules import V_SHAPED
from minidist.plan.device import PlanError
from minidist.plan.stages import SCHEDULES

CHOICES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4, 8, 16),
    "cp": (1, 2, 4, 8, 16),
    "ep": (1, 2, 4, 8, 16, 32, 64),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "microbatch": (1, 2, 4, 8),
    "chunks": (1, 2, 3, 4, 5, 6, 8),
    "schedule": ("1f1b", "interleaved", "zb-h1", *V_SHAPED),
    "offload": (False, True),
    "order": (AXES, ("pp", "dp", "cp", "tp")),  # stages near each other, or replicas
}
# if fixed
ALSO = {
    "schedule": SCHEDULES,
    "order": (*permutations(AXES),),
}
COUNTS = ("tp", "pp", "dp", "cp", "ep", "microbatch", "chunks", "hsdp")
LONG = 16384  # tokens of a sequence from which context parallelism is looked at


def options(fixed: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    """Return what a field may be."""
    return (fixed[name],) if name in fixed else CHOICES[name]


def divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors of a number, in order, at most `most`."""
    last = number if most is None else min(number, most)
    return [each for each in range(1, last + 1) if number % each == 0]


def check_fixed(fixed: Mapping[str, Any]) -> None:
    """Refuse fields that are not looked for, and values that they cannot have."""
    known = CHOICES | {"pp": (1,), "dp": (1,), "hsdp": (1,)} | ALSO
    for name, value in fixed.items():
        if name not in known:
            meant = nearest(name, known)
            choose = f"{meant} Or choose" if meant else "choose"
            raise PlanError(f"{name} cannot be fixed: {choose} among {', '.join(known)}")
        if name in COUNTS:
            possible = type(value) is int and value >= 1
            can = "a whole number, at least 1"
        else:
            # True is not 1
            alike = [each for each in known[name] if type(each) is type(value)]
            possible = value in alike
            can = f"one of {', '.join(map(str, known[name]))}"
        if not possible:
            raise PlanError(f"{name}={value} cannot be: it is {can}")
