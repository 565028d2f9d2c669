"""Groups of ranks that were derived from others, and how they are used again.

    rank 0   split, forget it ─────────────────── split: "number 1 is free here" ─┐ roll call
    rank 1   split ──────────── forget it ─────── split: "number 1 is free here" ─┴▶ both take number 1 again

MPICH offers 2,048 groups, and all ranks must free a group together. Python, however, drops an
object at a different moment on each rank. So we never free a group: we reuse it once every rank has
dropped it. A dropped group goes back to a pool of the group that it came from. Ranks derive groups
in the same order, and then tell each other what is free. There are never more groups than were in
use at the same time. As in MPI, a message that was sent on one must have been received.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minidist.full.comm.wire import Wire

MANY = 16


@dataclass
class Pool:
    """The groups derived from one group; `free` has the numbers of those that this rank has
    forgotten, `among` the first group of each choice of ranks that was made without the others.
    """

    # ranks, handle, and what is derived from it
    made: dict[int, tuple[list[int], Any, Pool]] = field(default_factory=dict)
    free: set[int] = field(default_factory=set)
    among: dict[tuple[int, ...], Group] = field(default_factory=dict)
    many: int = MANY


@dataclass(eq=False)
class Group:
    """An engine's own group, such as an MPI communicator, as long as somebody on this rank uses it.

    Attributes
    ----------
    handle : object
        What the engine calls it by.
    pool : Pool
        The groups derived from it. They return to it before this group returns to its own pool,
        because each keeps its `origin`.
    """

    handle: Any
    pool: Pool = field(default_factory=Pool)
    origin: Group | None = None

    def derive(
        self, wire: Wire, parts: list[list[int]], mine: list[int], make: Callable[[], Any]
    ) -> Group:
        """Return a group of `mine`, this rank's part of `wire`'s ranks: a free one, or a new one.
        Collective.

        Either every part gets one that is free, or all ranks `make` a handle.
        """
        made, free = self.pool.made, self.pool.free
        if len(made) - len(free) >= self.pool.many:
            gc.collect()  # what is in a cycle
            self.pool.many = max(MANY, 2 * (len(made) - len(free)))
        everyones = wire.all_gather_object({number: made[number][0] for number in sorted(free)})
        spares = [
            next(
                (
                    n
                    for n in everyones[part[0]]
                    if all(everyones[rank].get(n) == part for rank in part)
                ),
                None,
            )
            for part in parts
        ]
        number = spares[parts.index(mine)]
        if number is None or None in spares:
            number = len(made)  # the same on all ranks: they make groups together
            made[number] = (mine, make(), Pool())
        free.discard(number)
        group = Group(*made[number][1:], self)
        weakref.finalize(group, free.add, number).atexit = False
        return group
