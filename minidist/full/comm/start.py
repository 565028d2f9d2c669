"""`init()`: which launcher started this process? Nothing outside this floor reads the
environment.
"""

import os
import sys
from typing import Any

from minidist.full.comm.agree import debug_mode
from minidist.full.comm.communicator import Communicator
from minidist.full.comm.errors import LaunchError
from minidist.full.comm.job.limit import MPI_SIZES, first_set, time_limit
from minidist.full.comm.job.watchdog import arrival
from minidist.full.comm.mpi_wire.segment import check_room
from minidist.full.comm.threads_wire.threads_wire import alone
from minidist.full.trace import Trace

MPI_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMIX_RANK")
TORCH_RANKS = ("RANK", "SLURM_PROCID")
MEMBER, STORE = "MINIDIST_MEMBER", "MINIDIST_STORE"
MEMBERS = (MEMBER, STORE, "MINIDIST_WANTED")  # what launch --replace tells its ranks
OVER_MPI = "MINIDIST_OVER_MPI"  # our launcher's ranks, which mpirun starts: a port for them
RESTARTS = ("MINIDIST_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
ARRIVAL = 8.0  # seconds that the slowest rank has to start, at least: a busy machine takes its time


def init(
    group: Any = None,
    *,
    debug: bool | None = None,
    limit: float | None = None,
    trace: Trace | None = None,
) -> Communicator:
    """Return the communicator of all ranks that were started together with this one.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or mpi4py.MPI.Intracomm, optional
        Wrap a group that exists instead. None looks at what the launcher left behind: torchrun or
        srun with MASTER_ADDR give the `torch` wire, mpirun gives `mpi`; otherwise this process is
        the only rank.
    debug : bool, optional
        Have every collective compare what the ranks call. Default: whether MINIDIST_DEBUG is set.
    limit : float, optional
        Seconds that one operation may wait before the job ends with a report of who waits for whom.
        Default: MINIDIST_LIMIT, or 300.
    trace : Trace, optional
        Record events there.

    Raises
    ------
    LaunchError
        If the launcher belongs to another MPI than this Python, /dev/shm is too small for MPI, or
        the limit is no time.
    """
    comm = _communicator(group, time_limit(limit))
    comm.debug, comm.trace = debug_mode(debug), trace
    return comm


def launched_rank() -> str:
    """Return the number of this rank as its launcher says it, before there is a communicator."""
    return first_set(MEMBER, *MPI_RANKS, *TORCH_RANKS) or "0"


def started_by_mpi() -> bool:
    """Tell whether mpirun has started this process, whatever it is for."""
    return not os.environ.keys().isdisjoint(MPI_RANKS)


def launched_over_mpi() -> bool:
    """Tell whether our own launcher has started this process, by mpirun."""
    return OVER_MPI in os.environ and under_mpirun()


def under_mpirun() -> bool:
    """Tell whether mpirun has started this process, and not torchrun, nor srun for torch."""
    return _launcher() == "mpi4py"


def set_as_torchrun() -> None:
    """Set what torchrun tells its ranks, if our launcher and mpirun have started this one.

    For programs that read RANK, WORLD_SIZE, LOCAL_RANK and their like. The launcher starts all
    ranks on one machine, and says by `MINIDIST_OVER_MPI` that they are MPI's nevertheless.
    (PyTorch's documentation of `torch.distributed.run`, "Environment Variables".)
    """
    rank, size = first_set(*MPI_RANKS), first_set(*MPI_SIZES)
    if rank and size and OVER_MPI in os.environ:
        os.environ |= {"RANK": rank, "WORLD_SIZE": size, "GROUP_RANK": "0"}
        os.environ |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ[OVER_MPI]}


def restarts() -> int:
    """Return how often the launcher has started this job before: ours, torchrun or SLURM."""
    counts = [os.environ.get(name, "") for name in RESTARTS]
    return max((int(count) for count in counts if count.isdecimal()), default=0)


def first_ranks() -> int:
    """Return on how many ranks our launcher has first started this job; 0 if it has not said so."""
    count = os.environ.get("MINIDIST_RANKS", "")
    return int(count) if count.isdecimal() else 0


def is_member() -> bool:
    """Tell whether the launcher has started this process as one that replaces others, or is
    replaced: `launch --replace`.
    """
    return STORE in os.environ


def _communicator(group: Any, limit: float) -> Communicator:
    if group is None and is_member():
        raise LaunchError(
            "this process was started by launch --replace, but the program does not enter views of "
            "the job (minidist.full.comm.membership): leave --replace out"
        )
    library = _launcher() if group is None else type(group).__module__.partition(".")[0]
    if library == "torch":
        from minidist.full.comm.torch_wire import torch_wire

        return torch_wire.world(limit) if group is None else torch_wire.wrap(group, limit)
    if library == "mpi4py":
        check_room()
        with arrival(max(limit, ARRIVAL)):
            from minidist.full.comm.mpi_wire import mpi_wire  # which starts MPI

            return mpi_wire.world(limit) if group is None else mpi_wire.wrap(group, limit)
    if group is None:
        return alone()
    raise TypeError(
        "init() wraps a torch.distributed group or an mpi4py communicator, not "
        f"{type(group).__name__}"
    )


def _launcher() -> str:
    """Return the library that the launcher of this process expects it to use, if there was one."""
    distributed = sys.modules.get("torch.distributed")
    in_torch_group = (
        distributed is not None
        and distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_backend() != "minidist"  # ours, over what we are looking for
    )
    for_torch = "MASTER_ADDR" in os.environ and not os.environ.keys().isdisjoint(TORCH_RANKS)
    # the port tells our launcher's variables from those of a torchrun inside one of its ranks
    ours = OVER_MPI in os.environ and os.environ.get("MASTER_PORT") == os.environ[OVER_MPI]
    if in_torch_group or (for_torch and not ours):
        return "torch"
    return "mpi4py" if started_by_mpi() else ""
