"""`init()`: which launcher started this process? Nothing outside this floor reads the environment."""

import os
import sys
from typing import Any

from minidist.comm.agree import debug_mode
from minidist.comm.communicator import Communicator
from minidist.comm.errors import LaunchError
from minidist.comm.job.number import SECONDS, read_number
from minidist.comm.job.watchdog import arrival
from minidist.comm.threads_wire.threads import alone
from minidist.trace import Trace

LIMIT = 300.0  # seconds that one operation may wait
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMIX_RANK", "RANK", "SLURM_PROCID")
ARRIVAL = 8.0  # seconds that the slowest rank has to start, at least: a busy machine takes its time


def init(
    group: Any = None, *, debug: bool | None = None, limit: float | None = None, trace: Trace | None = None
) -> Communicator:
    """Return the communicator of all ranks that were started together with this one.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or mpi4py.MPI.Intracomm, optional
        Wrap a group that exists instead. None looks at what the launcher left behind: torchrun or srun with
        MASTER_ADDR give the `torch` wire, mpirun gives `mpi`; otherwise this process is the only rank.
    debug : bool, optional
        Have every collective compare what the ranks call. Default: whether MINIDIST_DEBUG is set.
    limit : float, optional
        Seconds that one operation may wait before the job ends with a report of who waits for whom. Default:
        MINIDIST_LIMIT, or 300.
    trace : Trace, optional
        Record events there.

    Raises
    ------
    LaunchError
        If the launcher belongs to another MPI than this Python, or the limit is no time.
    """
    written = os.environ.get("MINIDIST_LIMIT", LIMIT) if limit is None else limit
    try:
        limit = read_number(written, float, SECONDS)
    except ValueError as error:
        raise LaunchError(f"{'MINIDIST_LIMIT' if limit is None else 'limit'}={written} {error}") from None
    comm = _wrap(group, limit) if group is not None else _world(limit)
    comm.debug, comm.trace = debug_mode(debug), trace
    return comm


def launched_rank() -> str:
    """Return the number of this rank as its launcher says it, before there is a communicator."""
    return next((os.environ[name] for name in RANKS if name in os.environ), "0")


def _world(limit: float) -> Communicator:
    distributed = sys.modules.get("torch.distributed")
    in_torch_group = distributed is not None and distributed.is_available() and distributed.is_initialized()
    by_torch = "MASTER_ADDR" in os.environ and not {"RANK", "SLURM_PROCID"}.isdisjoint(os.environ)
    if in_torch_group or by_torch:
        from minidist.comm.torch_wire import torch_wire

        return torch_wire.world(limit)
    if any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMIX_RANK")):
        with arrival(max(limit, ARRIVAL)):
            from minidist.comm.mpi_wire import mpi  # which starts MPI

            return mpi.world(limit)
    return alone()


def _wrap(group: Any, limit: float) -> Communicator:
    if type(group).__module__.startswith("mpi4py"):
        with arrival(max(limit, ARRIVAL)):
            from minidist.comm.mpi_wire import mpi

            return mpi.wrap(group, limit)
    if type(group).__module__.startswith("torch"):
        from minidist.comm.torch_wire import torch_wire

        return torch_wire.wrap(group, limit)
    raise TypeError(f"init() wraps a torch.distributed group or an mpi4py communicator, not {type(group).__name__}")
