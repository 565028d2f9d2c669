"""Engines by name, as `run(engine=...)` takes them.

    threads       all ranks run at once, and the system interleaves them
    cooperative   exactly one runs, and hands over where it waits; on threads that pass a baton: any program
    greenlets     the same, on stacks of one thread: ten times as fast, for programs that wait neither in a
                  backward nor under `no_grad`: numpy, or tensors without gradients; refused elsewhere

The rule is written and explicit, since nobody can tell before a program runs whether it will wait
inside a backward. Both cooperative engines draw alike: of one seed they make one interleaving.
"""

import math
from collections.abc import Sequence

from minidist.comm.threads_wire.carriers.baton import Baton
from minidist.comm.threads_wire.carriers.carrier import Carrier
from minidist.comm.threads_wire.carriers.cooperative import Cooperative
from minidist.comm.threads_wire.carriers.greenlets import Greenlets
from minidist.comm.threads_wire.carriers.order import Order, drawn, repeated
from minidist.comm.threads_wire.carriers.threads import Threads

ENGINES = ("threads", "cooperative", "greenlets")


def carrier_of(
    engine: str, seed: int | None, schedule: Sequence[str] | None, limit: float
) -> Carrier:
    """Return what carries the ranks; see `run`.

    Raises
    ------
    ValueError
        If there is no such engine, or an order is asked of one that has none.
    LaunchError
        If greenlets are asked for, and the package is not there.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r}: choose one of {', '.join(ENGINES)}")
    if engine == "threads":
        if seed is not None or schedule is not None:
            raise ValueError(
                "the system decides in which order threads run, so seed and schedule say nothing "
                "there: take engine='cooperative' as well"
            )
        return Threads(limit)
    if seed is not None and schedule is not None:
        raise ValueError("seed and schedule both say in which order ranks run: give one of them")
    order = drawn(seed or 0) if schedule is None else repeated(schedule)
    return cooperative(engine, order, limit, fine=schedule is not None)


def cooperative(engine: str, order: Order, limit: float = math.inf, *, fine: bool) -> Cooperative:
    """Return what carries ranks that take turns in an order; `fine`: at each call of a
    communicator.
    """
    if engine not in ENGINES[1:]:
        raise ValueError(f"engine={engine!r}: ranks take turns on {' and '.join(ENGINES[1:])}")
    stacks = Greenlets() if engine == "greenlets" else Baton()
    return Cooperative(stacks, order, limit, fine)
