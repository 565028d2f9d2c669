"""Floor 1 on simulated ranks: messages, groups, registered memory, counting."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

import minidist
from minidist import Cluster, Communicator, DeadlockError, run
from minidist.full.collectives import all_reduce
from minidist.full.comm import CommunicationError, Link, MismatchError
from minidist.full.comm.buffers import DTYPES
from minidist.full.comm.threads_wire.carriers.threads import Threads

NODES_OF_TWO = Cluster(Link(1e-6, 1e9), Link(1e-5, 1e8), ranks_per_node=2)


def test_run_returns_each_ranks_result_in_order() -> None:
    assert run(lambda comm: (comm.rank, comm.size, comm.wire.kind), 3) == [
        (rank, 3, "threads") for rank in range(3)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", (0, 1, 1000))
def test_every_dtype_arrives_whole(dtype: str, count: int) -> None:
    """From an array to a tensor and back, where both libraries know the dtype."""

    def tensor(values: np.ndarray) -> torch.Tensor:  # type: ignore[type-arg]
        return torch.from_numpy(values).to(getattr(torch, dtype))

    def program(comm: Communicator) -> None:
        values = np.random.default_rng(count).integers(0, 2, count)
        array = tensor(values) if dtype == "bfloat16" else values.astype(dtype)
        if comm.rank == 0:
            comm.send(array, 1)
            back = torch.full_like(array, 7) if dtype == "bfloat16" else np.ones_like(array)
            comm.recv(back, 1)
            assert (back == array).all()
        else:
            received = torch.ones(count, dtype=getattr(torch, dtype))
            comm.recv(received, 0)
            assert torch.equal(received, tensor(values))
            comm.send(received, 0)

    run(program, 2)


def test_a_buffer_of_any_shape_a_parameter_and_a_view_into_one_travel() -> None:
    def program(comm: Communicator) -> None:
        parameter = torch.nn.Parameter(torch.full((2, 3), float(comm.rank)))
        matrix = np.full((4, 2, 3), float(comm.rank))
        if comm.rank == 0:
            comm.send(parameter, 1)
            comm.send(matrix[1:3], 1)
            comm.send(np.array(5.0), 1)
        else:
            comm.recv(parameter, 0)
            comm.recv(matrix[2:], 0)
            scalar = np.array(0.0)
            comm.recv(scalar, 0)
            assert (parameter == 0).all() and parameter.requires_grad
            assert (matrix[2:] == 0).all() and (matrix[:2] == 1).all() and scalar == 5

    run(program, 2)


def test_tags_match_independently_and_each_in_order() -> None:
    def program(comm: Communicator) -> list[float]:
        if comm.rank == 0:
            sends = [
                comm.isend(np.array([10.0 * tag + n]), 1, tag)
                for n in range(3)
                for tag in (5, 0, 3)
            ]
            for request in reversed(sends):
                request.wait()
            return []
        got = np.zeros(9)
        for place, tag in enumerate((3, 3, 0, 5, 5, 5, 0, 3, 0)):
            comm.recv(got[place : place + 1], 0, tag)
        return got.tolist()

    assert run(program, 2)[1] == [30, 31, 0, 50, 51, 52, 1, 32, 2]


def test_a_request_may_be_tested_and_waited_for_more_than_once() -> None:
    def program(comm: Communicator) -> None:
        buffer = np.zeros(1)
        if comm.rank == 0:
            request = comm.irecv(buffer, 1)
            assert not request.test() and not request.test()
            comm.send(np.ones(1), 1, tag=1)
            while not request.test():
                pass
            request.wait()
            request.wait()
            assert request.test() and buffer[0] == 7
        else:
            comm.recv(np.zeros(1), 0, tag=1)
            request = comm.isend(np.full(1, 7.0), 0)
            request.wait()
            request.wait()
            assert request.test()

    run(program, 2)
    run(program, 2, cluster=Cluster.uniform(1e-6, 1e9))


def test_messages_posted_in_one_order_may_be_waited_for_in_another() -> None:
    def program(comm: Communicator) -> None:
        buffers = [np.zeros(1) for _ in range(20)]
        receives = [comm.irecv(buffer, 1 - comm.rank) for buffer in buffers]
        sends = [comm.isend(np.full(1, float(n)), 1 - comm.rank) for n in range(20)]
        for request in receives[::-1] + sends[::-1]:
            request.wait()
        assert [buffer[0] for buffer in buffers] == list(range(20))

    run(program, 2)


def test_exchange_turns_a_ring() -> None:
    def program(comm: Communicator) -> float:
        mine, arriving = np.full(1, float(comm.rank)), np.zeros(1)
        comm.exchange(
            mine, (comm.rank + 1) % comm.size, arriving, (comm.rank - 1) % comm.size, tag=4
        )
        return float(arriving[0])

    for ranks in (2, 3, 7):
        assert run(program, ranks) == [(rank - 1) % ranks for rank in range(ranks)]


def test_sends_wait_for_their_receive_however_small_unless_they_are_eager() -> None:
    def both_send_first(comm: Communicator) -> float:
        outgoing, incoming = np.full(4, float(comm.rank)), np.zeros(4)
        comm.send(outgoing, 1 - comm.rank)
        outgoing[:] = 99  # an eager message has left by now
        comm.recv(incoming, 1 - comm.rank)
        return float(incoming[0])

    with pytest.raises(DeadlockError, match="send to rank"):
        run(both_send_first, 2)
    with pytest.raises(DeadlockError, match="send to rank"):
        run(lambda comm: comm.send(np.zeros(0), 1 - comm.rank), 2)  # an empty one, too
    with pytest.raises(DeadlockError):
        run(both_send_first, 2, eager_limit=31)
    assert run(both_send_first, 2, eager_limit=32) == [1, 0]
    assert run(both_send_first, 2, eager_limit=32, cluster=Cluster.uniform(1e-6, 1e9)) == [1, 0]


def test_meta_tensors_travel_without_data_but_with_bytes() -> None:
    def program(comm: Communicator) -> int:
        buffer = torch.empty(1 << 30, dtype=torch.float32, device="meta")
        other = torch.empty(1 << 30, dtype=torch.float32, device="meta")
        comm.exchange(buffer, 1 - comm.rank, other, 1 - comm.rank)
        return comm.traffic.bytes

    assert run(program, 2) == [4 << 30, 4 << 30]


def test_meta_and_real_buffers_do_not_mix() -> None:
    def program(comm: Communicator) -> None:
        comm.send(np.ones(4), 1) if comm.rank == 0 else comm.recv(
            torch.empty(4, device="meta", dtype=torch.float64), 0
        )

    with pytest.raises(
        ValueError, match="cpu buffer was sent to a meta one: move both to one device"
    ):
        run(program, 2)


def test_unequal_sizes_are_named_with_both_ends() -> None:
    def program(comm: Communicator) -> None:
        comm.send(np.ones(4), 1, 9) if comm.rank == 0 else comm.recv(np.ones(5), 0, 9)

    with pytest.raises(
        MismatchError, match=r"rank 0 sends 32 bytes to rank 1, .* buffer of 40 \(tag 9; rank 0 at"
    ):
        run(program, 2)


def test_split_groups_by_color_in_the_order_of_keys() -> None:
    def program(comm: Communicator) -> tuple[int, ...]:
        group = comm.split(comm.rank % 2, key=-comm.rank)
        assert group.members[group.rank] == comm.rank and group.size == len(group.members)
        pair = group.split(group.rank // 2)
        total = np.full(1, float(comm.rank))
        if pair.size == 2:
            pair.exchange(total.copy(), 1 - pair.rank, total, 1 - pair.rank)
            assert total[0] == pair.members[1 - pair.rank]
        assert comm.split(7).members == tuple(range(comm.size))
        return group.members

    evens, odds = (6, 4, 2, 0), (5, 3, 1)
    assert run(program, 7) == [evens, odds, evens, odds, evens, odds, evens]


def test_equal_keys_keep_the_order_of_ranks_and_colors_of_any_integer_kind_are_alike() -> None:
    def program(comm: Communicator) -> tuple[int, ...]:
        color = [1, True, np.int64(1), np.uint8(1)][comm.rank]
        group = comm.split(color, key=0)  # type: ignore[arg-type]
        group.barrier()
        return group.members

    assert run(program, 4) == [(0, 1, 2, 3)] * 4


def test_messages_of_different_groups_never_meet() -> None:
    def program(comm: Communicator) -> None:
        first, second, fork = comm.split(0), comm.split(0), comm.fork()
        if comm.rank == 0:
            requests = [
                c.isend(np.full(1, n), 1) for n, c in enumerate((comm, first, second, fork))
            ]
            for request in requests:
                request.wait()
        else:
            got = np.zeros(4, np.int64)
            for n, c in reversed(list(enumerate((comm, first, second, fork)))):
                c.recv(got[n : n + 1], 0)
            assert got.tolist() == [0, 1, 2, 3]

    run(program, 2)


def test_a_roll_call_returns_every_answer_by_rank() -> None:
    def program(comm: Communicator) -> None:
        for step in range(50):
            assert comm.all_gather_object((step, comm.rank)) == [
                (step, rank) for rank in range(comm.size)
            ]
        assert comm.traffic.messages == 0

    run(program, 6)


def test_the_ranks_of_a_node_read_each_others_registered_memory() -> None:
    def program(comm: Communicator) -> None:
        for dtype in ("float32", np.int64, torch.float16):
            mine = comm.allocate((3, 4), dtype)
            assert mine.shape == (3, 4) and (mine == 0).all()
            mine[:] = comm.rank
            comm.fence()
            row = np.asarray(mine[1])
            everyones = comm.peers(row)
            assert everyones is not None and [view[0] for view in everyones] == list(
                range(comm.size)
            )
            assert all(len(view) == 4 for view in everyones)
            comm.fence()
        assert comm.peers(np.zeros(3)) is None, "ordinary memory has no peers"
        assert len(comm.allocate(0, np.float32)) == 0
        assert comm.split(0).peers(row) is None, "registered among other ranks"
        fork = comm.fork().peers(row)
        assert fork is not None and len(fork) == comm.size

    run(program, 3)


def test_memory_is_not_shared_between_nodes() -> None:
    def program(comm: Communicator) -> tuple[tuple[int, ...], bool]:
        buffer = comm.allocate(4, np.float32)
        return comm.node, comm.peers(buffer) is None  # type: ignore[arg-type]

    assert run(program, 4, cluster=NODES_OF_TWO) == [
        ((0, 1), True),
        ((0, 1), True),
        ((2, 3), True),
        ((2, 3), True),
    ]
    nodes = run(lambda comm: comm.nodes, 3, cluster=NODES_OF_TWO)
    assert nodes == [[(0, 1), (0, 1), (2,)]] * 3


def test_traffic_is_counted_exactly_also_of_splits_and_forks() -> None:
    def program(comm: Communicator) -> tuple[tuple[int, int], ...]:
        half, fork = comm.split(comm.rank // 2), comm.fork()
        inner = half.fork()
        for steps, group in enumerate((comm, half, fork, inner), start=1):
            peer = group.rank ^ 1
            for _ in range(steps):
                group.exchange(np.zeros(10 * steps), peer, np.zeros(10 * steps), peer)
        comm.exchange(np.zeros(0), comm.rank ^ 1, np.zeros(0), comm.rank ^ 1)
        return tuple((c.traffic.messages, c.traffic.bytes) for c in (comm, half, fork, inner))

    one, two, three, four = (80 * steps * steps for steps in (1, 2, 3, 4))
    assert (
        run(program, 4)
        == [((11, one + two + three + four), (6, two + four), (3, three), (4, four))] * 4
    )


def test_what_is_only_refused_is_not_counted() -> None:
    def program(comm: Communicator) -> tuple[int, int]:
        for wrong in (np.zeros((4, 4))[:, 1], "text", np.zeros(3, complex)):
            with pytest.raises((TypeError, ValueError)):
                comm.send(wrong, 1 - comm.rank)  # type: ignore[arg-type]
        return comm.traffic.messages, comm.traffic.bytes

    assert run(program, 2) == [(0, 0)] * 2


def test_more_ranks_than_the_cluster_has_are_refused_with_the_fix() -> None:
    with pytest.raises(
        ValueError, match=r"17 ranks do not fit a h100 cluster of 16 .*ranks=16.*h100\(nodes=3\)"
    ):
        run(lambda comm: None, 17, cluster=Cluster.h100(2))
    with pytest.raises(ValueError, match="ranks=0"):
        run(lambda comm: None, 0)


def test_a_communicator_is_dead_after_its_run() -> None:
    comm = run(lambda comm: comm, 2)[0]
    with pytest.raises(CommunicationError, match="this run is over"):
        comm.send(np.zeros(1), 1)


def test_a_process_that_nobody_launched_is_the_only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PMI_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    comm = minidist.init()
    assert (comm.rank, comm.size, comm.node) == (0, 1, (0,))
    comm.barrier()
    assert comm.split(0).size == comm.fork().size == 1
    assert comm.stream().launch(lambda: 5).wait() == 5
    with pytest.raises(ValueError, match="to=1 is not a rank: there are 1"):
        comm.send(np.zeros(1), 1)


def test_a_run_leaves_no_memory_behind_that_only_the_garbage_collector_would_find() -> None:
    buffers = []

    def program(comm: Communicator) -> None:
        buffer, other = np.zeros(1000), comm.allocate(1000, np.float64)
        buffers.extend([weakref.ref(buffer), weakref.ref(other)])
        comm.exchange(buffer, 1 - comm.rank, other, 1 - comm.rank)
        stream = comm.split(0).stream()
        stream.launch(all_reduce, buffer, stream.comm).wait()
        for algorithm in ("ring", "recursive", "shared", "hierarchical"):
            all_reduce(buffer, comm, algorithm=algorithm)

    gc.disable()
    try:
        run(program, 2)
        deadline = time.monotonic() + 60  # the streams' threads end on their own
        while any(reference() is not None for reference in buffers) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [reference() for reference in buffers] == [None] * 4
    finally:
        gc.enable()


def test_runs_may_be_nested_and_repeated() -> None:
    def program(comm: Communicator) -> list[int]:
        inner = run(lambda inner: inner.rank, 2)
        comm.barrier()
        return inner

    assert run(program, 3) == [[0, 1]] * 3


def test_torch_s_functions_are_called_once_before_threads_share_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MKL may give one of two first callers a kernel of half the digits."""
    called: list[tuple[str, torch.dtype]] = []

    def noted(x: torch.Tensor, plain: Callable[..., torch.Tensor] = torch.cos) -> torch.Tensor:
        called.append((threading.current_thread().name, x.dtype))
        return plain(x)

    monkeypatch.setattr(torch, "cos", noted)
    run(lambda comm: torch.cos(torch.ones(2)), 2)
    here = threading.current_thread().name
    assert called[:2] == [(here, torch.float32), (here, torch.float64)]
    assert sorted(name for name, _ in called[2:]) == ["rank 0", "rank 1"]


def test_who_looks_for_a_thread_that_runs_is_not_disturbed_by_one_that_comes() -> None:
    """The table of threads grew while another thread went through it: a RuntimeError at random."""
    carrier = Threads(limit=60.0)
    comes = threading.Thread(target=carrier.here)
    with carrier.lock:  # as `somebody_runs` has it
        comes.start()
        comes.join(0.2)
        assert comes.is_alive() and comes not in carrier.running
    comes.join()
    assert comes in carrier.running


def test_work_of_a_stream_that_no_rank_waits_for_fails_no_run() -> None:
    """It is under way when the ranks have ended: such as a comparison after a forward of FSDP."""

    def program(comm: Communicator) -> int:
        stream = comm.stream()

        def meet() -> None:
            time.sleep(0.3 * comm.rank)  # the ranks end meanwhile
            stream.comm.all_gather_object(comm.rank)

        stream.launch(meet)
        return comm.rank

    assert run(program, 2) == [0, 1]
