"""How often to save? Saving seldom costs work that a failure undoes; saving often costs the time of
writing.

    time ─▶  │ compute τ │ write δ │ compute τ │ write δ │ comp ✗ restart R │ compute τ │ write δ │
                                                 └─────┘ lost: τ/2 or so

Failures come at random, one every M seconds on average. Each interval counts once it is written, so
the expected time of a run with T seconds to compute is `M e^(R/M) (e^((τ+δ)/M) - 1) T/τ`. Its
minimum has no closed form: Young's is of first order in δ/M, Daly's of higher. The curve is flat
there: twice or half of the best τ costs little. (Young 1974, A first order approximation to the
optimum checkpoint interval; Daly 2006, A higher order estimate of the optimum checkpoint interval
for restart dumps.)
"""

from math import exp, expm1, sqrt
from typing import NamedTuple


def young(write_seconds: float, mtbf_seconds: float) -> float:
    """Return the seconds of computing between two checkpoints, to first order: sqrt(2 δ M)."""
    _check(write_seconds, mtbf_seconds)
    return sqrt(2 * write_seconds * mtbf_seconds)


def daly(write_seconds: float, mtbf_seconds: float) -> float:
    """Return the seconds of computing between two checkpoints that make a run shortest, to higher
    order.

    Parameters
    ----------
    write_seconds
        δ, of writing one checkpoint.
    mtbf_seconds
        M, between two failures of the whole job, on average.

    Raises
    ------
    ValueError
        If a time is negative, or failures are 0 seconds apart.
    """
    first_order = young(write_seconds, mtbf_seconds)
    if write_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    small = write_seconds / (2 * mtbf_seconds)
    return first_order * (1 + sqrt(small) / 3 + small / 9) - write_seconds


class Shares(NamedTuple):
    """How the time of a run divides: into training, into writing checkpoints, and into what
    failures lose.
    """

    training: float
    writing: float
    lost: float


def shares(
    compute_seconds: float, write_seconds: float, mtbf_seconds: float, restart_seconds: float = 0.0
) -> Shares:
    """Return the expected shares of a long run that saves after each `compute_seconds` (Daly's
    exact model).
    """
    _check(write_seconds, mtbf_seconds)
    interval = (compute_seconds + write_seconds) / mtbf_seconds
    # τ / (M e^(R/M) (e^interval - 1)), so written that nothing overflows
    training = (
        compute_seconds
        / mtbf_seconds
        * exp(-interval - restart_seconds / mtbf_seconds)
        / -expm1(-interval)
    )
    writing = training * write_seconds / compute_seconds
    return Shares(training, writing, 1 - training - writing)


def advice(write_seconds: float, step_seconds: float, mtbf_hours: float) -> str:
    """Say every how many steps to save, and what that costs.

    Parameters
    ----------
    write_seconds, step_seconds
        Of writing a checkpoint, and of a step.
    mtbf_hours
        Between two failures of the whole job, on average.
    """
    mtbf = mtbf_hours * 3600
    steps = max(1, round(daly(write_seconds, mtbf) / step_seconds))
    found = shares(steps * step_seconds, write_seconds, mtbf)
    often = f"every {steps} {'step' if steps == 1 else 'steps'} ({_duration(steps * step_seconds)})"
    costs = (
        f"{found.writing:.1%} of the time then goes into writing and {found.lost:.1%} is lost by "
        "failures"
    )
    return f"save {often}: with a failure every {_duration(mtbf)} on average, {costs}"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _check(write_seconds: float, mtbf_seconds: float) -> None:
    if not (write_seconds >= 0 and mtbf_seconds > 0):
        raise ValueError(
            f"writing takes {write_seconds} s, failures are {mtbf_seconds} s apart: give positive "
            "times"
        )
