"""Which rank am I? torch keeps one default group a process; simulated ranks are threads of one.

    thread of rank 0 ──▶ its own default group, groups by name, generator
    thread of rank 1 ──▶ its own
    a thread that either begins ──▶ the same, as in a process: checkpoints are saved on one
    any other thread ──▶ what torch keeps for the process, as always

`RANKS.here()` answers for the thread that asks. On a simulated rank that is the rank of this
thread; under mpirun the whole process is one rank.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from minidist.full.comm.communicator import Communicator


class Rank:
    """What c10d keeps for one rank.

    Attributes
    ----------
    comm : Communicator
        All ranks of the default group.
    store : Store
        torch's own little key-value store, which all ranks share.
    generator : torch.Generator or None
        The default generator of a simulated rank. A process has torch's own.
    """

    def __init__(
        self, comm: Communicator, store: Store, generator: torch.Generator | None = None
    ) -> None:
        self.comm, self.store, self.generator = comm, store, generator
        self.thread = threading.get_ident()
        self._made: Counter[tuple[int, ...]] = Counter()
        self._meetings = 0

    def next_store(self) -> Store:
        """Return a part of the store in which nothing is written yet, for one default group and all
        others beside it. Every rank makes as many default groups.
        """
        self._meetings += 1
        return PrefixStore(f"meeting {self._meetings}", self.store)

    def group(self, ranks: list[int]) -> Communicator:
        """Return a communicator of `ranks`; only they call.

        Every member counts alike how often these ranks have made a group, so all find the same
        name. torch's own name would not do: where only members call, it counts the groups that a
        rank is in, and members may be in different numbers of groups.
        """
        self._made[tuple(ranks)] += 1
        among = ",".join(map(str, ranks))
        return self.comm.subgroup(ranks, f"c10d {among} #{self._made[tuple(ranks)]}")


class Ranks:
    """The ranks of this process: one a thread, or one in all."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._of_process: Rank | None = None

    def simulated(self) -> Rank | None:
        """Return the rank that this thread is, or None."""
        return getattr(self._of_thread, "rank", None)

    def here(self) -> Rank | None:
        """Return the rank that this thread is, or this process."""
        return self.simulated() or self._of_process

    def beside(self) -> bool:
        """Tell whether this is a thread that the program of a simulated rank has begun."""
        rank = self.simulated()
        return rank is not None and rank.thread != threading.get_ident()

    def enter(self, rank: Rank | None) -> None:
        """Let this thread be `rank`, or none any more."""
        self._of_thread.rank = rank

    def of_process(self, make: Callable[[], Rank]) -> Rank:
        """Return the rank that this process is; the first call makes it."""
        if self._of_process is None:
            self._of_process = make()
        return self._of_process

    def adopt(self, rank: Rank | None) -> None:
        """Let this process be `rank`, or none any more."""
        self._of_process = rank


# The one thing that is the process's own: torch's functions take no argument from which a rank
# could be known, only the thread that calls them.
RANKS = Ranks()
