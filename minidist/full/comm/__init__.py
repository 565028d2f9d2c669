"""Floor 1: ranks and messages, on four kinds of wire.

    threads               ranks are threads of this process                     minidist.run(fn, ranks=4)
    threads + cluster=    the same, on a modelled cluster's virtual clock       minidist.run(fn, ranks=64, cluster=...)
    mpi                   ranks are MPI processes                               mpirun -n 4 python x.py
    torch                 ranks are torch.distributed processes: gloo, NCCL     torchrun --nproc-per-node 8 x.py

`Communicator` is the same on all of them. Read `communicator.py` first: there a message is checked,
and counted in the books of `ledger.py`; `request.py` is one under way. Then `wire.py`, what carries
it, and `threads_wire/`. `mpi_wire/` and `torch_wire/` hand it to their *engine*, the library under
a wire: MPI, gloo or NCCL; `engine/` is what they share. With `job/` no rank waits for ever, and with
`membership/` a job goes on without the ranks that it loses.

`start.py` has `init`, `stream.py` the queue of collectives beside the main thread. `buffers.py` is
what travels, `registered.py` the memory that ranks of a node share. `agree.py` compares calls in
debug mode; `report.py` and `errors.py` find the words for what goes wrong.
"""

from minidist.full.comm.communicator import Communicator
from minidist.full.comm.errors import (
    CommunicationError,
    DeadlockError,
    LaunchError,
    LimitError,
    MismatchError,
    RankFailed,
)
from minidist.full.comm.start import init
from minidist.full.comm.threads_wire.cluster import Cluster, Link
from minidist.full.comm.threads_wire.threads_wire import run

__all__ = [
    "Cluster",
    "CommunicationError",
    "Communicator",
    "DeadlockError",
    "LaunchError",
    "LimitError",
    "Link",
    "MismatchError",
    "RankFailed",
    "init",
    "run",
]
