"""Ranks and messages, on four kinds of wire.

    the book              here
    Communicator          `Communicator`: with checks, and memory that ranks of a node share
    Transport             `Wire` (`wire.py`); threads also run one at a time, in an order that a seed says
    Traffic               `Traffic` (`ledger.py`), which counts what engines send, too, by formula
    split, fork           `Communicator.split`, and `Communicator.subgroup`, which calls nobody else
    Stream                `Stream` (`stream.py`), each job with a handle; on a GPU a stream of CUDA

    threads               ranks are threads of this process                     minidist.run(fn, ranks=4)
    threads + cluster=    the same, on a modelled cluster's virtual clock       minidist.run(fn, ranks=64, cluster=...)
    mpi                   ranks are MPI processes                               mpirun -n 4 python x.py
    torch                 ranks are torch.distributed processes: gloo, NCCL     torchrun --nproc-per-node 8 x.py

`Communicator` is the same on all of them. Read `minidist/comm.py` first, then `communicator.py`:
there a message is checked, and counted in the books of `ledger.py`; `request.py` is one under way.
Then `wire.py`, what carries it, and `threads_wire/`. `mpi_wire/` and `torch_wire/` hand it to their
*engine*, the library under a wire: MPI, gloo or NCCL; `engine/` is what they share. With `job/` no
rank waits for ever, and with `membership/` a job goes on without the ranks that it loses.

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
