"""One collective, by minidist and by its peers, on buffers of the same size.

    auto         what `algorithm="auto"` chooses, on ordinary numpy arrays
    handle       the same by a handle, of `prepare`: checked and chosen once, in place of at every call
    registered   `auto` on buffers of `comm.allocate`, on which an all-reduce works in place
    ring, ...    what --algorithms names
    native       MPI's own, called through mpi4py
    gloo         torch.distributed's, on tensors

Every competitor has buffers of its own, full of zeros (sums of zeros never overflow). Sizes are
those of the whole buffer, rounded to a multiple of the ranks; if that makes two the same, it is
measured once.

`p2p` is a message there and one back, by `comm.send` and `comm.recv`, by MPI and by gloo.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import minidist.full.collectives as collectives
from minidist.bench.measure import Run
from minidist.bench.options import size_text
from minidist.bench.subject import Case, Setting, Subject, subject
from minidist.full.collectives import COLLECTIVES, prepare
from minidist.full.comm import Communicator


def ours(
    comm: Communicator, how: str, full: Any, shard: Any, out: Any, counts: list[int]
) -> dict[str, Run]:
    """Return minidist's collectives by name, with algorithm `how`."""
    return {
        "all_reduce": lambda: collectives.all_reduce(full, comm, algorithm=how),
        "reduce_scatter": lambda: collectives.reduce_scatter(full, comm, algorithm=how),
        "all_gather": lambda: collectives.all_gather(shard, comm, out, how),
        "broadcast": lambda: collectives.broadcast(full, comm, 0, how),
        "reduce": lambda: collectives.reduce(full, comm, 0, algorithm=how),
        "gather": lambda: collectives.gather(shard, comm, 0, how, counts),
        "scatter": lambda: collectives.scatter(full if comm.rank == 0 else None, comm, 0, how),
        "all_to_all": lambda: collectives.all_to_all(full, comm, how),
    }


def prepared(
    comm: Communicator, operation: str, full: Any, shard: Any, out: Any, counts: list[int]
) -> Run:
    """Return a handle of minidist's collective."""
    match operation:
        case "all_gather":
            return prepare(operation, shard, comm, out=out)
        case "gather":
            return prepare(operation, shard, comm, counts=counts)
        case "scatter":
            return prepare(operation, full if comm.rank == 0 else None, comm)
        case _:
            return prepare(operation, full, comm)


def native(
    mpi: Any,
    full: Any,
    shard: Any,
    out: Any,
    counts: list[int],
) -> dict[str, Run]:
    """Return MPI's collectives by name."""
    # here, because it starts MPI, and the bounds are read where there is none
    from mpi4py import MPI

    return {
        "all_reduce": lambda: mpi.Allreduce(MPI.IN_PLACE, full),
        "reduce_scatter": lambda: mpi.Reduce_scatter(full, shard, counts),
        "all_gather": lambda: mpi.Allgather(shard, out),
        "broadcast": lambda: mpi.Bcast(full),
        "reduce": lambda: mpi.Reduce(
            full if mpi.rank else MPI.IN_PLACE, None if mpi.rank else full
        ),
        "gather": lambda: mpi.Gather(shard, None if mpi.rank else out),
        "scatter": lambda: mpi.Scatter(None if mpi.rank else full, shard),
        "all_to_all": lambda: mpi.Alltoall(full, out),
    }


def by_gloo(
    gloo: Any,
    full: Any,
    shard: Any,
    out: Any,
    counts: list[int],
) -> dict[str, Run]:
    """Return torch.distributed's collectives by name."""
    # torch 2.13 renames these two
    reduce_scatter = getattr(gloo, "reduce_scatter_single", gloo.reduce_scatter_tensor)
    all_gather = getattr(gloo, "all_gather_single", gloo.all_gather_into_tensor)
    return {
        "all_reduce": lambda: gloo.all_reduce(full),
        "reduce_scatter": lambda: reduce_scatter(shard, full),
        "all_gather": lambda: all_gather(out, shard),
        "broadcast": lambda: gloo.broadcast(full, 0),
        "reduce": lambda: gloo.reduce(full, 0),
        "gather": lambda: gloo.gather(
            shard, None if gloo.get_rank() else list(out.split(counts)), 0
        ),
        "scatter": lambda: gloo.scatter(
            shard, None if gloo.get_rank() else list(full.split(counts)), 0
        ),
        "all_to_all": lambda: gloo.all_to_all_single(out, full),
    }


def collective(operation: str) -> Subject:
    """Return the bench of one collective: seconds of a call at every size, with the bus bandwidth
    of nccl-tests.
    """

    def cases(setting: Setting) -> Iterator[Case]:
        """Seconds of one call at every size, against MPI's own and gloo."""
        options, comm, on_gpus = setting.options, setting.comm, setting.launch == "nccl"
        itemsize = np.dtype(options.dtype).itemsize
        shares = [max(1, size // itemsize // comm.size) for size in options.sizes]
        counts = [share * comm.size for share in dict.fromkeys(shares)]
        # One window for all sizes: every registered buffer of a program makes finding one a little
        # longer.
        in_place = operation == "all_reduce" and "registered" in options.algorithms
        registered: Any = comm.allocate(max(counts), options.dtype) if in_place else None
        device = options.device if on_gpus else ""
        for count in counts:
            new = partial(buffers, comm, count, options.dtype)
            runs: dict[str, Run] = {}
            for how in (*["native"] * on_gpus, *options.algorithms):
                if how == "registered" and in_place:
                    runs[how] = ours(comm, "auto", *new(device, registered))[operation]
                elif how == "handle":
                    runs[how] = prepared(comm, operation, *new(device))
                elif how in collectives.algorithms(operation):
                    runs[how] = ours(comm, how, *new(device))[operation]
            if ("native" in options.peers and not on_gpus) or setting.launch == "tuned":
                runs["native"] = native(comm.wire.mpi, *new())[operation]  # type: ignore[attr-defined]
            if setting.gloo is not None:
                runs["gloo"] = by_gloo(setting.gloo, *new("cpu"))[operation]
            yield Case(size_text(count * itemsize), runs, count * itemsize)

    return Subject(
        operation,
        cases,
        ("native", "native tuned", "gloo"),
        rounds=15,
        gloo=True,
    )


def buffers(
    comm: Communicator, count: int, dtype: str, device: str = "", registered: Any = None
) -> list[Any]:
    """Return what a collective of `count` elements reads and writes: all of it, this rank's shard,
    as much for output.

    These are arrays, the first perhaps registered, or tensors; the last are the elements of each
    rank's shard.
    """
    share = count // comm.size
    # written: every page is there
    arrays: list[Any] = [np.full(length, 0, dtype) for length in (count, share, count)]
    if registered is not None:
        arrays[0] = registered[:count]
    if device:
        import torch

        arrays = [torch.from_numpy(array).to(device) for array in arrays]
    return [*arrays, [share] * comm.size]


all_reduce, reduce_scatter, all_gather, broadcast, reduce, gather, scatter, all_to_all = map(
    collective, COLLECTIVES
)


@subject(peers=("native", "gloo"), rounds=15)
def p2p(setting: Setting) -> Iterator[Case]:
    """Seconds of half a round trip between ranks 0 and 1, while the other ranks look on. No
    bound.
    """
    comm, mpi = setting.comm, setting.comm.wire.mpi  # type: ignore[attr-defined]
    for bytes in dict.fromkeys((8, *setting.options.sizes)):
        array = np.zeros(bytes, np.uint8)
        runs = {"send": ping_pong(comm.send, comm.recv, comm.rank, array)}
        if "native" in setting.options.peers:
            runs["native"] = ping_pong(mpi.Send, mpi.Recv, comm.rank, array)
        if setting.gloo is not None:
            import torch

            runs["gloo"] = ping_pong(
                setting.gloo.send, setting.gloo.recv, comm.rank, torch.from_numpy(array)
            )
        yield Case(size_text(bytes), runs, bytes, units=2)


def ping_pong(
    send: Callable[[Any, int], object], receive: Callable[[Any, int], object], rank: int, array: Any
) -> Run:
    """Return a round trip."""

    def there_and_back() -> None:
        if rank == 0:
            send(array, 1)
            receive(array, 1)
        elif rank == 1:
            receive(array, 0)
            send(array, 0)

    return there_and_back
