"""minidist: distributed training from scratch.

    import minidist

    def hello(comm):
        return f"rank {comm.rank} of {comm.size}"

    minidist.run(hello, ranks=4)        # four simulated ranks in this process
    comm = minidist.init()              # or: this process is one rank of `mpirun` or `torchrun`

Read the pages next to this file, from `comm.py` to `train.py`; README.md has them in order. They
need none of the folders. The names here are those of `minidist.full`, the engine behind the pages,
and each is imported when it is asked for (PEP 562).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from minidist.full.comm import Cluster, Communicator, DeadlockError, init
    from minidist.full.mesh import Layout, Mesh
    from minidist.full.trace import Trace

__version__ = "1.0.0"
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
        then compare every collective before it begins, unless MINIDIST_DEBUG=0. On a `cluster`
        matrix products take time as well, at the peak of its devices. See `minidist.torch_backend`.
    options
        `cluster`, `engine`, `seed`, `schedule`, `eager_limit`, `limit`, `debug`, `trace`: see
        `minidist.full.comm.run`, which says what is raised.
    """
    if torch:
        from minidist.torch_backend import simulated

        fn = simulated(_computing(fn, options.get("cluster")))
    simulated_run = import_module("minidist.full.comm").run
    return list(simulated_run(fn, ranks, **options))


def __getattr__(name: str) -> Any:
    """Import one of the names above from where it is defined."""
    if name not in __all__:
        raise AttributeError(f"module 'minidist' has no attribute {name!r}")
    floor = {"Layout": "mesh", "Mesh": "mesh", "Trace": "trace"}.get(name, "comm")
    return getattr(import_module(f"minidist.full.{floor}"), name)


def _computing(
    fn: Callable[[Communicator], _Result], cluster: Cluster | None
) -> Callable[[Communicator], _Result]:
    """Return `fn` with products that take time on the cluster's clock."""
    if cluster is None:
        return fn
    from minidist.full.meta import Computing

    def on_clock(comm: Communicator) -> _Result:
        with Computing(comm, cluster.flops):
            return fn(comm)

    return on_clock
