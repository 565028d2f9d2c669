"""On every rank: messages, groups, streams and every collective, on tensors of the rank's device.

python -m minidist launch -n 2 --ranks-per-gpu 2 tests/gpu/collectives_on_ranks.py all
python -m minidist launch -n 4 --ranks-per-gpu 4 tests/gpu/collectives_on_ranks.py few     three dtypes, two sizes
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from collective_cases import (
    DTYPES,
    FEW,
    REDUCTIONS,
    Cell,
    assert_unknown_operations_refused,
    cells,
    check,
    sizes,
)

import minidist
from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator


def check_messages(comm: Communicator, device: str) -> None:
    """Neighbours exchange, with empty messages among them, and wait for requests in either
    order.
    """
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    mine, theirs = (
        torch.full((1000,), comm.rank, device=device),
        torch.empty(1000, dtype=torch.int64, device=device),
    )
    if comm.size > 1:
        comm.exchange(mine, right, theirs, left)
        assert (theirs == left).all()
        comm.exchange(mine[:0], right, theirs[:0], left)
        requests = [comm.irecv(theirs, left), comm.isend(mine + 1, right)]
        for request in requests[:: 1 if comm.rank else -1]:
            request.wait()
        assert (theirs == left + 1).all()
    comm.barrier()


def check_streams(comm: Communicator, device: str) -> None:
    """Two streams and the caller reduce at the same time, what the caller computes meanwhile."""
    streams, own = (
        [comm.stream(), comm.stream()],
        torch.ones(999, device=device, dtype=torch.float64),
    )
    buffers = [torch.ones(1 << 16, device=device, dtype=torch.float64) for _ in range(6)]
    handles = []
    for number, buffer in enumerate(buffers):
        buffer *= number + comm.rank  # the stream has to wait for this
        stream = streams[number % 2]
        name = ("native", "ring")[number % 2]
        handles.append(stream.launch(all_reduce, buffer, stream.comm, "sum", name))
        all_reduce(own, comm, "mean", "native")
    for number, (buffer, handle) in enumerate(zip(buffers, handles, strict=True)):
        handle.wait()
        # and this has to wait for the stream
        buffer -= comm.size * number + comm.size * (comm.size - 1) // 2
    assert not any(buffer.any() for buffer in buffers)
    assert (own == 1).all()


def check_memory(comm: Communicator, device: str) -> None:
    registered = comm.allocate((2, 3), torch.bfloat16)
    assert registered.device.type == device and registered.shape == (2, 3) and not registered.any()
    assert isinstance(comm.allocate(4, np.float32), np.ndarray)


def table(which: str) -> list[Cell]:
    """Return what is tried: `all` that there is, or what takes turns on a GPU in reasonable
    time.
    """
    if which == "all":
        return cells()
    few = cells(dtypes=FEW, ops=("sum", "mean"))
    native = cells(operations=("all_reduce",), dtypes=DTYPES, ops=REDUCTIONS)
    return few + [cell for cell in native if cell.algorithm == "native" and cell not in few]


def main(which: str) -> None:
    comm = minidist.init()
    device = "cuda" if comm.wire.carries_cuda else "cpu"
    for group in (comm, comm.split(0, key=-comm.rank), comm.split(comm.rank), comm.fork()):
        check_messages(group, device)
    comm.debug = True
    check_messages(comm, device)
    comm.debug = False
    check_memory(comm, device)
    check_streams(comm, device)
    worked, refused = check(comm, table(which), (0, 1, 11) if which == "all" else (1, 11))
    odd = (
        check(comm, cells(dtypes=("float32",), ops=("mean",)), [*sizes(comm.size), 4099])[0]
        if which == "all"
        else 0
    )
    check(
        comm.split(0, key=-comm.rank),
        [cell for cell in cells(dtypes=FEW) if cell.algorithm == "native"],
        (5,),
    )
    assert_unknown_operations_refused(comm)
    engine = "NCCL" if device == "cuda" else "gloo"
    print(
        f"on {comm.size} ranks, {engine}: {worked + odd} cells are right, {refused} are refused",
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1])
