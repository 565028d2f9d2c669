"""Floor 1: ranks and messages, on four kinds of wire.

    threads               ranks are threads of this process                     minidist.run(fn, ranks=4)
    threads + cluster=    the same, on a modelled cluster's virtual clock       minidist.run(fn, ranks=64, cluster=...)
    mpi                   ranks are MPI processes                               mpirun -n 4 python x.py
    torch                 ranks are torch.distributed processes: gloo, NCCL     torchrun --nproc-per-node 8 x.py

`Communicator` is the same on all of them. Read `communicator.py` first, then `wire.py` and `threads_wire/`. With
`job/` no rank waits for ever; `engine/` is what the wires of processes share.
"""

from minidist.comm.communicator import Communicator
from minidist.comm.errors import CommunicationError, DeadlockError, LaunchError, MismatchError, RankFailed
from minidist.comm.start import init
from minidist.comm.threads_wire.cluster import Cluster, Link
from minidist.comm.threads_wire.threads import run

__all__ = [
    "Cluster",
    "CommunicationError",
    "Communicator",
    "DeadlockError",
    "LaunchError",
    "Link",
    "MismatchError",
    "RankFailed",
    "init",
    "run",
]
