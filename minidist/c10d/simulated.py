"""`minidist.run(program, ranks=4, torch=True)`: a program of torch.distributed on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from minidist.c10d.register import as_users_want, register
from minidist.c10d.waiting_store import WaitingStore
from minidist.c10d.worlds import simulated_rank
from minidist.comm.communicator import Communicator

Result = TypeVar("Result")


def simulated(program: Callable[[Communicator], Result]) -> Callable[[Communicator], Result]:
    """Return `program`, to be run on one set of simulated ranks that are processes to torch: each
    has its own default group, names and generator.

    What stays the process's own, and so every rank's: `torch.set_default_dtype`,
    `torch.set_num_threads`, environment variables, `random` and `numpy.random`.
    """
    register()
    store = WaitingStore()

    def on_a_rank(comm: Communicator) -> Result:
        with simulated_rank(as_users_want(comm), store):
            return program(comm)

    return on_a_rank
