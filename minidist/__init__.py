"""minidist: distributed training from scratch.

    import minidist

    def hello(comm):
        return f"rank {comm.rank} of {comm.size}"

    minidist.run(hello, ranks=4)        # four simulated ranks in this process
    comm = minidist.init()              # or: this process is one rank of `mpirun` or `torchrun`

Read the package from the ground floor up: `trace`, `comm`, `collectives`, `mesh` and `model`,
`parallel`, `trainer`.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from minidist import comm as _comm
from minidist.comm import Cluster, Communicator, DeadlockError, init
from minidist.mesh import Layout, Mesh
from minidist.trace import Trace

__version__ = "0.3.0"
__all__ = ["Cluster", "Communicator", "DeadlockError", "Layout", "Mesh", "Trace", "init", "run"]

_Result = TypeVar("_Result")


def run(
    fn: Callable[[Communicator], _Result], ranks: int, *, torch: bool = False, **options: Any
) -> list[_Result]:
    """Call `fn(comm)` on each of `ranks` simulated ranks and return their results, by rank.

    Parameters
    ----------
    torch : bool
        Let each rank be a process to torch: with its own default group, so that
        `init_process_group("minidist")` works in `fn`, and its own default generator. The ranks
        then compare every collective before it begins, unless MINIDIST_DEBUG=0. See
        `minidist.c10d`.
    options
        `cluster`, `eager_limit`, `limit`, `debug`, `trace`: see `minidist.comm.run`, which says
        what is raised.
    """
    if torch:
        from minidist.c10d import simulated

        fn = simulated(fn)
    return _comm.run(fn, ranks, **options)
