"""One collective, by minidist and by its peers, on buffers of the same size.

    auto         what `algorithm="auto"` takes, on ordinary numpy arrays
    registered   the same, on buffers of `comm.allocate`: an all-reduce works on those in place
    ring, ...    what --algorithms names
    native       MPI's own, called through mpi4py
    gloo         torch.distributed's, on tensors

Every competitor has buffers of its own, full of zeros (sums of zeros never overflow). Sizes are those of the whole
buffer, rounded to a multiple of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from minidist import collectives
from minidist.bench.measure import Measurement, Run, alternate
from minidist.bench.options import Options, size_text

if TYPE_CHECKING:
    from minidist.comm import Communicator

ROUNDS = 15


@dataclass(frozen=True)
class Buffers:
    """What a collective reads and writes: all of it, and this rank's shard; numpy arrays, or tensors for gloo."""

    full: Any
    shard: Any
    out: Any
    counts: list[int]  # elements of each rank's shard


Ours = Callable[[Buffers, "Communicator", str], object]
OURS: dict[str, Ours] = {
    "all_reduce": lambda b, comm, how: collectives.all_reduce(b.full, comm, algorithm=how),
    "reduce_scatter": lambda b, comm, how: collectives.reduce_scatter(b.full, comm, algorithm=how),
    "all_gather": lambda b, comm, how: collectives.all_gather(b.shard, comm, b.out, how),
    "broadcast": lambda b, comm, how: collectives.broadcast(b.full, comm, 0, how),
    "reduce": lambda b, comm, how: collectives.reduce(b.full, comm, 0, algorithm=how),
    "gather": lambda b, comm, how: collectives.gather(b.shard, comm, 0, how, b.counts),
    "scatter": lambda b, comm, how: collectives.scatter(b.full if comm.rank == 0 else None, comm, 0, how),
    "all_to_all": lambda b, comm, how: collectives.all_to_all(b.full, comm, how),
}

NATIVE: dict[str, Callable[[Buffers, Any], object]] = {
    "all_reduce": lambda b, mpi: mpi.Allreduce(MPI.IN_PLACE, b.full),
    "reduce_scatter": lambda b, mpi: mpi.Reduce_scatter(b.full, b.shard, b.counts),
    "all_gather": lambda b, mpi: mpi.Allgather(b.shard, b.out),
    "broadcast": lambda b, mpi: mpi.Bcast(b.full),
    "reduce": lambda b, mpi: mpi.Reduce(b.full if mpi.rank else MPI.IN_PLACE, None if mpi.rank else b.full),
    "gather": lambda b, mpi: mpi.Gather(b.shard, None if mpi.rank else b.out),
    "scatter": lambda b, mpi: mpi.Scatter(None if mpi.rank else b.full, b.shard),
    "all_to_all": lambda b, mpi: mpi.Alltoall(b.full, b.out),
}

GLOO: dict[str, Callable[[Buffers, Any], object]] = {
    "all_reduce": lambda b, gloo: gloo.all_reduce(b.full),
    # torch 2.13 renames the two; both are on the way
    "reduce_scatter": lambda b, gloo: getattr(gloo, "reduce_scatter_single", gloo.reduce_scatter_tensor)(
        b.shard, b.full
    ),
    "all_gather": lambda b, gloo: getattr(gloo, "all_gather_single", gloo.all_gather_into_tensor)(b.out, b.shard),
    "broadcast": lambda b, gloo: gloo.broadcast(b.full, 0),
    "reduce": lambda b, gloo: gloo.reduce(b.full, 0),
    "gather": lambda b, gloo: gloo.gather(b.shard, None if gloo.get_rank() else list(b.out.split(b.counts)), 0),
    "scatter": lambda b, gloo: gloo.scatter(b.shard, None if gloo.get_rank() else list(b.full.split(b.counts)), 0),
    "all_to_all": lambda b, gloo: gloo.all_to_all_single(b.out, b.full),
}


def bench_collective(
    operation: str, options: Options, launch: str, comm: Communicator, gloo: Any
) -> Iterator[Measurement]:
    """Measure one collective at every size; `gloo` is torch.distributed with a group, or None."""
    itemsize = np.dtype(options.dtype).itemsize
    counts = [max(1, size // itemsize // comm.size) * comm.size for size in options.sizes]
    # One window for all sizes: every registered buffer of a program makes finding one a little longer.
    in_place = operation == "all_reduce" and "registered" in options.algorithms
    registered: Any = comm.allocate(max(counts), options.dtype) if in_place else None
    offered = (*collectives.algorithms(operation), *(["registered"] if in_place else []))
    for count in counts:
        runs: dict[str, Run] = {}
        for how in options.algorithms:
            if how in offered:
                buffers = _buffers(comm, count, options.dtype, registered if how == "registered" else None)
                runs[how] = _bind(OURS[operation], buffers, comm, "auto" if how == "registered" else how)
        if "native" in options.peers or launch == "tuned":
            runs["native"] = _bind(NATIVE[operation], _buffers(comm, count, options.dtype), comm.mpi)  # type: ignore[attr-defined]
        if gloo is not None:
            runs["gloo"] = _bind(GLOO[operation], _tensors(_buffers(comm, count, options.dtype)), gloo)
        bytes = count * itemsize
        for name, values in alternate(runs, comm, options.rounds or ROUNDS).items():
            yield Measurement(operation, size_text(bytes), name, launch, values, bytes=bytes, ranks=comm.size)


def bench_p2p(options: Options, launch: str, comm: Communicator, gloo: Any) -> Iterator[Measurement]:
    """Measure half a round trip between ranks 0 and 1: `send` and `recv`, MPI's, gloo's. The other ranks look on."""
    mpi = comm.mpi  # type: ignore[attr-defined]
    for bytes in (8, *options.sizes):
        array = np.zeros(bytes, np.uint8)
        runs: dict[str, Run] = {"send": _ping_pong(comm.send, comm.recv, comm.rank, array)}
        if "native" in options.peers:
            runs["native"] = _ping_pong(mpi.Send, mpi.Recv, comm.rank, array)
        if gloo is not None:
            runs["gloo"] = _ping_pong(gloo.send, gloo.recv, comm.rank, _tensors_of(array))
        for name, values in alternate(runs, comm, options.rounds or ROUNDS).items():
            halves = tuple(seconds / 2 for seconds in values)
            yield Measurement("p2p", size_text(bytes), name, launch, halves, bytes=bytes, ranks=comm.size)


def _ping_pong(send: Callable[[Any, int], object], receive: Callable[[Any, int], object], rank: int, array: Any) -> Run:
    def there_and_back() -> None:
        if rank == 0:
            send(array, 1)
            receive(array, 1)
        elif rank == 1:
            receive(array, 0)
            send(array, 0)

    return there_and_back


def _bind(function: Callable[..., object], *args: Any) -> Run:
    return lambda: function(*args)


def _buffers(comm: Communicator, count: int, dtype: str, registered: Any = None) -> Buffers:
    def zeros(length: int) -> Any:
        return np.full(length, 0, dtype)  # written, unlike numpy.zeros: every page is there

    full = zeros(count) if registered is None else registered[:count]
    share = count // comm.size
    return Buffers(full, zeros(share), zeros(count), [share] * comm.size)


def _tensors(buffers: Buffers) -> Buffers:
    return Buffers(_tensors_of(buffers.full), _tensors_of(buffers.shard), _tensors_of(buffers.out), buffers.counts)


def _tensors_of(array: Any) -> Any:
    import torch

    return torch.from_numpy(array)
