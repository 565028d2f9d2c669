"""The window: which units are unsharded, which is gathered next, and which may be freed.

    forward     [1 2] 3  4        in use, and gathered ahead: `most` units at a time, beside the root
                 1 [2 3] 4
                 1  2 [3 4]
    backward     the same, from the right

The order is that of the last forward. `FSDP` says which unit it needs now; the window gathers it,
begins to gather the one after it, and frees another one if there would be too many.
"""

from itertools import pairwise

from minidist.full.fsdp.ranks import Ranks
from minidist.full.fsdp.unit import ShardedState, Unit

# Units that may be unsharded at a time, besides the root: a limit of memory. However large it is, one
# unit is gathered ahead: the one that `unshard` calls `then`.
MOST = 2


class Window:
    """The units of a model, and those of them that have memory now.

    Parameters
    ----------
    units : list[Unit]
        The root last.
    most : int
        How many units may be unsharded at a time, besides the root.
    ranks : Ranks
        On whose stream they are gathered.

    Attributes
    ----------
    unsharded : list[Unit]
        Those that are gathered, or being gathered, the oldest first; without the root.
    order : list[Unit]
        The order in which the last forward called them.
    entered : dict[Unit, None]
        Those that any forward of this step called, in order.
    next, previous : dict[Unit, Unit]
        What to gather after a unit, in forward and in backward.
    """

    def __init__(self, units: list[Unit], most: int, ranks: Ranks) -> None:
        self.units, self.root = units, units[-1]
        self.most, self.ranks = most, ranks
        self.unsharded: list[Unit] = []
        self.order: list[Unit] = []
        self.entered: dict[Unit, None] = {}
        self.next: dict[Unit, Unit] = {}
        self.previous: dict[Unit, Unit] = {}

    # ---------------------------------------------------------------- the order

    def enter(self, unit: Unit) -> None:
        """Gather a unit for its forward, and begin to gather what came after it last time."""
        if unit is self.root:
            self.order = []
        self.order.append(unit)
        self.entered[unit] = None
        self.unshard(unit, self.next.get(unit))

    def forward_ended(self) -> None:
        """Expect the same order in the next forward, and its reverse in backward."""
        self.next = dict(pairwise(self.order))
        self.previous = {after: before for before, after in pairwise([*self.order, self.root])}

    def ahead(self, unit: Unit) -> Unit | None:
        """Return which unit's backward follows this unit's: what to gather ahead of it."""
        return self.previous.get(unit)

    def in_backward(self) -> list[Unit]:
        """Return the units in the order in which all ranks reduce their gradients, the root last:
        in reverse to their forwards.
        """
        called = dict.fromkeys([*reversed(self.order), *self.entered])
        called.pop(self.root, None)
        return [*called, self.root]

    # ---------------------------------------------------------------- memory

    def unshard(self, unit: Unit, then: Unit | None, beside: Unit | None = None) -> None:
        """Make a unit whole, and begin to gather the one that is needed `then`.

        If one must be freed for it, it is not the one `beside`.
        """
        self.prefetch(unit, beside)
        if then is not None:
            self.prefetch(then, unit)
        unit.wait_for_unshard()

    def prefetch(self, unit: Unit, *beside: Unit | None) -> None:
        """Begin to gather a unit.

        If too many are unsharded, free one first, but none of those `beside`.
        """
        if unit.sharded_state is not ShardedState.SHARDED:
            return
        if unit is not self.root:
            if len(self.unsharded) == self.most:
                self.reshard(next(other for other in self.unsharded if other not in beside))
            self.unsharded.append(unit)
        unit.unshard(self.ranks)

    def reshard(self, unit: Unit) -> None:
        """Free a unit."""
        unit.reshard()
        if unit in self.unsharded:
            self.unsharded.remove(unit)

    def unshard_all(self) -> None:
        """Gather every unit anew, all at a time."""
        self.reshard_all()
        for unit in self.units:
            unit.unshard(self.ranks)
            unit.wait_for_unshard()

    def reshard_all(self) -> None:
        """Free every unit."""
        for unit in self.units:
            self.reshard(unit)
