"""Engines by name, as `run(engine=...)` takes them.

    threads       all ranks run at once, and the system interleaves them
    cooperative   exactly one runs, and hands over where it waits; on threads that pass a baton: any program
    greenlets     the same, on stacks of one thread: ten times as fast, for programs that wait neither in a
                  backward nor under `no_grad`: numpy, or tensors without gradients; refused elsewhere
    browser       the same, on stacks that a browser sets aside: the only one there, and only there

The rule is written and explicit, since nobody can tell before a program runs whether it will wait
inside a backward. All cooperative engines draw alike: of one seed they make one interleaving.
"""

import math
from collections.abc import Callable, Sequence

from minidist.comm.threads_wire.carriers.baton import Baton
from minidist.comm.threads_wire.carriers.browser import IN_BROWSER, Browser
from minidist.comm.threads_wire.carriers.carrier import Carrier
from minidist.comm.threads_wire.carriers.cooperative import Cooperative, Stacks
from minidist.comm.threads_wire.carriers.greenlets import Greenlets
from minidist.comm.threads_wire.carriers.order import Order, drawn, repeated
from minidist.comm.threads_wire.carriers.threads import Threads

ON_STACKS: dict[str, Callable[[], Stacks]] = (
    {"browser": Browser} if IN_BROWSER else {"cooperative": Baton, "greenlets": Greenlets}
)
ENGINES = tuple(ON_STACKS) if IN_BROWSER else ("threads", *ON_STACKS)  # that there are here


def carrier_of(
    engine: str | None, seed: int | None, schedule: Sequence[str] | None, limit: float
) -> Carrier:
    """Return what carries the ranks; see `run`. None: the first of the engines that there are here.

    Raises
    ------
    ValueError
        If there is no such engine here, or an order is asked of one that has none.
    LaunchError
        If greenlets are asked for, and the package is not there, or the browser cannot set a stack
        aside.
    """
    engine = ENGINES[0] if engine is None else engine
    _check(engine, ENGINES)
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


def cooperative(
    engine: str | None, order: Order, limit: float = math.inf, *, fine: bool
) -> Cooperative:
    """Return what carries ranks that take turns in an order; `fine`: at each call of a
    communicator. None: the first of the engines where they do.
    """
    engine = next(iter(ON_STACKS)) if engine is None else engine
    _check(engine, tuple(ON_STACKS))
    return Cooperative(ON_STACKS[engine](), order, limit, fine)


def _check(engine: str, there: Sequence[str]) -> None:
    if engine not in there:
        why = "Python has one thread in a browser: leave engine out, or " if IN_BROWSER else ""
        raise ValueError(f"engine={engine!r}: {why}choose one of {', '.join(there)}")
