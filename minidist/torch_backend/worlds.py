"""A default group for each simulated rank, where torch keeps one for the process.

torch looks everything up in one object, `distributed_c10d._world`, "an extension point to override
it". While simulated ranks run, `Worlds` stands there: it hands each question on to the `World` of
the thread that asks. The groups that C++ finds by name are kept by thread as well: torch's
*isolation mode*.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed.distributed_c10d as c10d

# Its functions name the default group when they are defined. On a rank, that would be this rank's
# group for all; so they are defined before there is one.
import torch.distributed.nn.functional
import torch.utils._python_dispatch as dispatch
from torch._C._distributed_c10d import Store

from minidist.full.comm.communicator import Communicator
from minidist.full.comm.job.background import BackgroundThread
from minidist.torch_backend.generators import OwnGenerator, default_generators
from minidist.torch_backend.ranks import RANKS, Rank
from minidist.torch_backend.register import as_users_want, register
from minidist.torch_backend.waiting_store import WaitingStore

Result = TypeVar("Result")


def simulated(program: Callable[[Communicator], Result]) -> Callable[[Communicator], Result]:
    """Return `program`, to be run on one set of simulated ranks that are processes to torch: each
    has its own default group, names and generator.

    What stays the process's own, and so every rank's: `torch.set_default_dtype`,
    `torch.set_num_threads`, environment variables, `random` and `numpy.random`.
    """
    # A rank's first operation imports this, while other ranks may import what it needs.
    import torch._dynamo  # noqa: F401

    register()
    store = WaitingStore()

    def on_a_rank(comm: Communicator) -> Result:
        with simulated_rank(as_users_want(comm), store):
            return program(comm)

    return on_a_rank


class World(c10d._World):
    """What torch knows of the groups of one rank."""

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count: Any = 0

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks = {}, {}, {}
        self.pg_backend_config, self.tags_to_pg, self.pg_to_tag = {}, {}, {}


class Worlds:
    """Hands on to the world of the thread that asks."""

    def __init__(self, process: Any) -> None:
        self.__dict__["process"], self.__dict__["thread"] = process, threading.local()

    def mine(self) -> Any:
        """Return this thread's world."""
        return getattr(self.__dict__["thread"], "world", self.__dict__["process"])

    def enter(self, world: World | None) -> None:
        """Give this thread a world of its own, or the process's again."""
        if world is None:
            del self.__dict__["thread"].world
        else:
            self.__dict__["thread"].world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self.mine(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.mine(), name, value)


isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]


class Isolation:
    """torch, as long as simulated ranks run in this process; the last one to leave restores it."""

    def __init__(self) -> None:
        self.lock, self.users = threading.Lock(), 0
        self.worlds: Worlds | None = None

    @contextmanager
    def of(self) -> Iterator[Worlds]:
        """Return the worlds for the body."""
        with self.lock:
            self.users += 1
            if self.users == 1:
                self.worlds = Worlds(c10d._world)
                self.excepthook = sys.excepthook  # torch wraps it for every default group
                # whether a mode is entered, which torch notes as if no two threads had one
                modes = vars(dispatch).items()
                self.modes = {name: value for name, value in modes if name.startswith("_is_in_")}
                self.generators = default_generators()
                self.generators.__enter__()
                c10d._world = self.worlds  # type: ignore[assignment]
                isolate(True)
                self.start = threading.Thread.start
                threading.Thread.start = inherited(self.start, self.worlds)  # type: ignore[method-assign]
            worlds = self.worlds
        assert worlds is not None
        try:
            yield worlds
        finally:
            with self.lock:
                self.users -= 1
                if self.users == 0:
                    threading.Thread.start = self.start  # type: ignore[method-assign]
                    isolate(False)
                    c10d._world = worlds.__dict__["process"]
                    self.generators.__exit__(None, None, None)
                    sys.excepthook = self.excepthook
                    for name, entered in self.modes.items():
                        setattr(dispatch, name, entered)


ISOLATION = Isolation()


@contextmanager
def simulated_rank(comm: Communicator, store: Store) -> Iterator[Rank]:
    """Let this thread be a rank of its own for torch.distributed and for torch's generator."""
    rank = Rank(comm, store, torch.Generator())
    with ISOLATION.of() as worlds, being(rank, World(), worlds):
        yield rank


@contextmanager
def being(rank: Rank, world: World, worlds: Worlds) -> Iterator[None]:
    """Let this thread be a rank in the body."""
    with OwnGenerator(rank.generator):
        worlds.enter(world)
        RANKS.enter(rank)
        try:
            yield
        finally:
            RANKS.enter(None)
            worlds.enter(None)


def inherited(start: Callable[[threading.Thread], None], worlds: Worlds) -> Any:
    """Return `Thread.start` for ranks: a thread that a rank's program begins is the rank, too.
    torch would take it for a process that knows no others, and save a checkpoint of one rank.
    """

    @functools.wraps(start)
    def start_as_rank(thread: threading.Thread) -> None:
        rank, world = RANKS.simulated(), worlds.mine()
        if rank is not None and not isinstance(thread, BackgroundThread):
            run = thread.run

            def run_as_rank() -> None:
                with being(rank, world, worlds):
                    run()

            thread.run = run_as_rank  # type: ignore[method-assign]
        start(thread)

    return start_as_rank
