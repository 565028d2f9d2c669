"""Engines by name, as `run(engine=...)` takes them.

    threads       all ranks run at once, and the system interleaves them
    cooperative   exactly one runs, and hands over where it waits; on threads that pass a baton: any program
    browser       the same, on stacks that a browser sets aside: the only one there, and only there

All cooperative engines draw alike: of one seed they make one interleaving.
"""

from collections.abc import Callable

from minidist.full.comm.threads_wire.carriers.baton import Baton
from minidist.full.comm.threads_wire.carriers.browser import IN_BROWSER, Browser
from minidist.full.comm.threads_wire.carriers.carrier import Carrier
from minidist.full.comm.threads_wire.carriers.cooperative import Cooperative, Stacks
from minidist.full.comm.threads_wire.carriers.threads import Threads

ON_STACKS: dict[str, Callable[[], Stacks]] = (
    {"browser": Browser} if IN_BROWSER else {"cooperative": Baton}
)
ENGINES = tuple(ON_STACKS) if IN_BROWSER else ("threads", *ON_STACKS)  # that there are here


def carrier_of(engine: str | None, seed: int | None, limit: float) -> Carrier:
    """Return what carries the ranks; see `run`. None: the first of the engines that there are here.

    Raises
    ------
    ValueError
        If there is no such engine here, or a seed is given to threads.
    LaunchError
        If the browser cannot set a stack aside.
    """
    engine = ENGINES[0] if engine is None else engine
    if engine not in ENGINES:
        why = "Python has one thread in a browser: leave engine out, or " if IN_BROWSER else ""
        raise ValueError(f"engine={engine!r}: {why}choose one of {', '.join(ENGINES)}")
    if engine != "threads":
        return Cooperative(ON_STACKS[engine](), seed or 0, limit)
    if seed is not None:
        raise ValueError(
            "the system decides in which order threads run, so a seed says nothing there: take "
            "engine='cooperative' as well"
        )
    return Threads(limit)
