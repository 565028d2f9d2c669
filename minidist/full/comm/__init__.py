"""Ranks and messages, on four kinds of wire.

    the book               here
    comm.Communicator      `communicator.Communicator`, a subclass: any page of the book takes one
    Communicator._check    `Communicator._checked`, and `buffers.flatten` for the buffer
    comm.Transport         `wire.Wire`; `wire.WireAround` sees all that passes one
    comm.Request           `request.Pending` of users, `wire.Request` of a wire
    comm.Traffic           `ledger.Traffic`, a subclass; who waits, and traces, are in `ledger.Ledger`
    comm.Stream            `stream.ThreadStream`; on a GPU `torch_wire/cuda_stream.CudaStream`
    comm.bytes_of          `buffers.as_bytes`
    threads.run            `threads_wire/threads_wire.run`
    threads.World          `threads_wire/world.World`; what runs the ranks is in `threads_wire/carriers/`
    threads.Message        `threads_wire/lanes.Operation`, with the clock of a `Lane`
    World.prove            `World._prove_progress`, in words by `threads_wire/standstill.deadlock`
    cluster.Cluster        `threads_wire/cluster.Cluster`
    processes.init         `start.init`
    MPITransport           `mpi_wire/mpi_wire.MpiWire`
    TorchTransport         `torch_wire/torch_wire.TorchWire`
    end_job_on_error       `job/watchdog.Watchdog`, which also ends a job that hangs

Read `minidist/comm.py` first, then `communicator.py`: there a message is checked, and counted in
the books of `ledger.py`; `request.py` is one under way. Then `wire.py`, what carries it, and
`threads_wire/`. `mpi_wire/` and `torch_wire/` hand it to their *engine*, the library under a wire:
MPI, gloo or NCCL; `engine/` is what they share. With `job/` no rank waits for ever, and with
`membership/` a job goes on without the ranks that it loses. `buffers.py` is what travels,
`registered.py` the memory that ranks of a node share. `agree.py` compares calls in debug mode;
`report.py` and `errors.py` find the words for what goes wrong.
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
