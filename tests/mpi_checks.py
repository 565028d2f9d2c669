"""What has to work on MPI ranks, however many: `mpirun -n 3 python tests/mpi_checks.py [torch]`
prints what it did.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

if "torch" in sys.argv:
    import torch

import numpy as np
from collective_cases import (
    FEW,
    assert_unknown_operations_refused,
    available,
    cells,
    check,
    digest,
    rounds,
    sizes,
)
from mpi4py import MPI

import minidist
from minidist import Communicator
from minidist.full.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    explain,
    gather,
    prepare,
    reduce,
    reduce_scatter,
)
from minidist.full.comm import MismatchError


def collectives(comm: Communicator) -> None:
    if "torch" in sys.argv:
        check(comm, cells())
    else:
        check(comm, cells(dtypes=FEW, ops=("sum", "mean")), sizes(comm.size))
    # some exceed a segment, all what MPI sends eagerly
    check(comm, cells(dtypes=FEW, ops=("sum",)), [70_000], seed=1)
    assert_unknown_operations_refused(comm)


def messages(comm: Communicator) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.size == 1:
        return
    for count in (0, 1, 1000, 300_000):
        mine, arriving = np.full(count, comm.rank), np.full(count, -1)
        comm.exchange(mine, right, arriving, left, tag=3)
        assert (arriving == left).all()
        tags = (5, 0, (1 << 20) - 1)
        got = [np.full(count, -1) for _ in tags]
        sends = [comm.isend(np.full(count, tag), right, tag) for tag in tags]
        receives = [
            comm.irecv(buffer, left, tag)
            for buffer, tag in zip(reversed(got), reversed(tags), strict=True)
        ]
        while not all(request.test() for request in receives):
            pass
        for request in sends + receives:
            request.wait()
            request.wait()
        assert [
            int(buffer.max(initial=tag)) for buffer, tag in zip(got, tags, strict=True)
        ] == list(tags)
    comm.barrier()


def counting(comm: Communicator) -> None:
    if comm.size == 1:
        return
    before = (comm.traffic.messages, comm.traffic.bytes)
    all_reduce(np.ones(840), comm, algorithm="ring")
    comm.barrier()
    n, expected = 8 * 840, 2 * (comm.size - 1) + rounds(comm.size)
    assert comm.traffic.messages - before[0] == expected
    assert comm.traffic.bytes - before[1] == 2 * (comm.size - 1) * n // comm.size
    before = (comm.traffic.messages, comm.traffic.bytes)
    buffer = comm.allocate(840 * 12, np.float64)
    all_reduce(buffer, comm)
    assert explain("all_reduce", buffer.nbytes, comm)[0] == "shared"
    assert comm.traffic.messages == before[0], "shared memory needs no message"
    assert comm.traffic.bytes - before[1] == 2 * (comm.size - 1) * buffer.nbytes // comm.size


def registered_memory(comm: Communicator) -> None:
    for length in (1, 7, 1000, 400_000):
        memory = comm.allocate(length + 5, np.float32)
        assert (memory == 0).all()
        peers = comm.peers(memory)
        for repetition in range(20 if length < 5000 else 3):
            memory[:] = repetition
            memory[2 : length + 2] = comm.rank + repetition
            all_reduce(memory[2 : length + 2], comm, algorithm="shared")
            expected = sum(range(comm.size)) + comm.size * repetition
            assert (memory[2 : length + 2] == expected).all() and (memory[:2] == repetition).all()
            comm.fence()
            assert peers is not None and all(
                (view[2 : length + 2] == expected).all() for view in peers
            )
            comm.fence()


def same_bits(comm: Communicator) -> None:
    for algorithm in available("all_reduce", comm):
        for op in ("sum", "max", "prod"):
            buffer = np.random.default_rng(comm.rank).standard_normal(5001).astype(np.float32)
            buffer[:6] = np.roll([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf], comm.rank)
            with np.errstate(invalid="ignore"):
                all_reduce(buffer, comm, op, algorithm)
            if algorithm != "native":  # MPI promises nothing about it
                assert len(set(comm.all_gather_object(digest(buffer)))) == 1, algorithm


def groups(comm: Communicator) -> None:
    group = comm.split(comm.rank % 2, key=-comm.rank)
    assert group.members == tuple(range(comm.size))[comm.rank % 2 :: 2][::-1]
    total = np.full(10, float(comm.rank))
    all_reduce(total, group)
    assert (total == sum(group.members)).all()
    assert comm.node == tuple(range(comm.size))
    assert comm.all_gather_object(comm.rank) == list(range(comm.size))


def streams(comm: Communicator) -> None:
    stream, other = comm.stream(), comm.stream()
    buffers = [np.full(20_000, float(comm.rank + step)) for step in range(10)]
    registered = comm.allocate(10_000, np.float64)
    registered[:] = comm.rank
    handles = [stream.launch(all_reduce, buffer, stream.comm) for buffer in buffers]
    handles.append(other.launch(all_reduce, registered, other.comm))
    beside = np.full(3000, float(comm.rank))
    all_reduce(beside, comm)
    shard = reduce_scatter(np.ones(100), comm)
    whole = all_gather(shard, comm)
    for handle in handles:
        handle.wait()
    total = sum(range(comm.size))
    assert all((buffer == total + comm.size * step).all() for step, buffer in enumerate(buffers))
    assert (beside == total).all() and (whole == comm.size).all() and (registered == total).all()
    naps: list[bool] = []
    computing = threading.Event()

    def look() -> None:
        naps.append(stream.comm.wire.patient)
        computing.set()
        while stream.comm.wire.patient:
            time.sleep(0.001)

    handle = stream.launch(look)
    assert computing.wait(10) and naps == [True], "a stream naps while its rank computes"
    handle.wait()  # and does not once its rank waits for it: else this never ends


def mismatches(comm: Communicator) -> None:
    """Only what the receiver notices without any other rank being lost."""
    if comm.size == 1:
        return
    peer = comm.rank ^ 1
    if peer < comm.size:
        try:
            comm.exchange(np.ones(4), peer, np.ones(5), peer)
        except MismatchError as error:
            assert f"rank {peer} sent 32 bytes, but the receive has a buffer of 40 (tag 0)" in str(
                error
            )
        else:
            raise AssertionError("a message that is too short was taken")
        assert comm.ledger.status.waiting is None, "who has given up waits no more"
    comm.debug = True
    try:
        all_reduce(np.ones(4 + comm.rank), comm)
    except MismatchError as error:
        assert "rank 0 calls all_reduce(float64, 4" in str(
            error
        ) and "rank 1 calls all_reduce(float64, 5" in str(error)
    else:
        raise AssertionError("a mismatch was not noticed")
    collectives_in_debug_mode = np.ones(3)
    all_reduce(collectives_in_debug_mode, comm)
    messages(comm)  # which have their dtypes beside them
    comm.debug = False
    assert (collectives_in_debug_mode == comm.size).all()


def refused(comm: Communicator) -> None:
    if "torch" not in sys.argv or comm.size == 1:
        return
    nowhere = torch.ones(3 * comm.size, device="meta")
    calls: dict[str, Callable[[], object]] = {
        "send": lambda: comm.send(nowhere, (comm.rank + 1) % comm.size),
        "all_to_all": lambda: all_to_all(nowhere, comm, "native"),
        "gather": lambda: gather(nowhere, comm, 0, "native", [3 * comm.size] * comm.size),
    }
    for operation in (all_reduce, reduce_scatter, all_gather, broadcast, reduce):
        calls[operation.__name__] = partial(operation, nowhere, comm, algorithm="native")
    calls["prepared"] = partial(prepare, "all_reduce", nowhere, comm, algorithm="native")
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            assert "the mpi wire carries CPU buffers, not meta: only simulated" in str(error), name
        else:
            raise AssertionError(f"{name} has sent what has no memory")


def wrapping(comm: Communicator) -> None:
    """A communicator of the user's own, with messages of the user's own under way."""
    theirs = MPI.COMM_WORLD.Dup()
    note = np.zeros(1)
    pending = theirs.Irecv(note, MPI.ANY_SOURCE, MPI.ANY_TAG)
    ours = minidist.init(theirs)
    assert (ours.rank, ours.size) == (comm.rank, comm.size)
    total = np.ones(3)
    all_reduce(total, ours, algorithm="ring")
    broadcast(total, ours)
    assert (total == comm.size).all()
    theirs.Send(np.full(1, 5.0), (comm.rank + 1) % comm.size)
    pending.Wait()
    assert note[0] == 5, "the user's receive was given a message of ours"


def main() -> None:
    comm = minidist.init()
    assert comm.wire.kind == ("mpi" if int(os.environ["PMI_SIZE"]) else "threads")
    assert "torch" in sys.argv or "torch" not in sys.modules, "MPI programs start without torch"
    steps: list[Callable[[Communicator], None]] = [
        messages,
        collectives,
        counting,
        registered_memory,
        same_bits,
        groups,
        streams,
        mismatches,
        refused,
        wrapping,
    ]
    for step in steps:
        started = time.perf_counter()
        step(comm)
        if comm.rank == 0:
            print(f"{step.__name__} {time.perf_counter() - started:.2f} s", flush=True)
    print(f"rank {comm.rank} is done", flush=True)


if __name__ == "__main__":
    main()
