"""Floor 2 on simulated ranks: every algorithm of every collective gives numpy's answer, the same
bits on all ranks.
"""

from __future__ import annotations

import itertools
import operator
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from collective_cases import (
    FEW,
    ROUNDING,
    assert_unknown_operations_refused,
    available,
    cells,
    check,
    copied,
    digest,
    draw,
    reduced,
    sizes,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist import Cluster, Communicator, run
from minidist.full import collectives
from minidist.full.collectives import (
    COLLECTIVES,
    DTYPES,
    REDUCTIONS,
    algorithms,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    explain,
    gather,
    prepare,
    reduce,
    reduce_scatter,
    scatter,
    shared,
)
from minidist.full.collectives.fast import Temporaries
from minidist.full.collectives.reduction import BITWISE
from minidist.full.comm import Link, MismatchError
from minidist.full.trace import Trace
from minidist.ring import ring_all_reduce

SEGMENT = 1 << 20
SMALL_NODES = Cluster(Link(1e-6, 1e9), Link(1e-5, 1e8), ranks_per_node=3, name="small nodes")


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_every_cell_of_the_table_gives_numpys_answer_or_a_sentence(operation: str) -> None:
    counted = run(lambda comm: check(comm, cells([operation])), 3)
    worked, refused = counted[0]
    assert worked >= len(DTYPES) and refused >= len(DTYPES) and counted == [(worked, refused)] * 3


ROOTED = ("broadcast", "reduce", "scatter", "gather")  # whose trees have three levels on 8 ranks


@pytest.mark.parametrize(
    ("operation", "ranks"),
    [
        pytest.param(
            operation,
            ranks,
            marks=[pytest.mark.soak]
            * (ranks in (6, 7) or (ranks == 8 and operation not in ROOTED)),
        )
        for ranks in (1, 2, 4, 5, 6, 7, 8)
        for operation in COLLECTIVES
    ],
)
def test_every_algorithm_gives_numpys_answer_on_any_number_of_ranks(
    operation: str, ranks: int
) -> None:
    run(lambda comm: check(comm, cells([operation], FEW, ("sum", "mean")), sizes(ranks)), ranks)


@pytest.mark.parametrize("ranks", (1, 3))
def test_an_operation_that_does_not_exist_is_refused_before_anything_is_sent(ranks: int) -> None:
    run(assert_unknown_operations_refused, ranks)


def test_the_table_that_is_printed_is_the_one_that_is_used() -> None:
    _, _, table = (collectives.__doc__ or "").partition("    family")
    head, *rows = ("    family" + table.split("\n\n")[0]).splitlines()
    columns = {match.group(): match.span() for match in re.finditer(r"\S+", head)}
    printed = {
        operation: {row.split()[0] for row in rows if "x" in row[start:end].split()}
        for operation, (start, end) in columns.items()
        if operation != "family"
    }
    variants = {"auto", "halving_doubling"}  # a rule, and the second of the recursive family
    assert printed == {
        operation: set(algorithms(operation)) - variants for operation in COLLECTIVES
    }


@pytest.mark.parametrize("ranks", (2, 5, 6, 7))
def test_hierarchies_on_nodes_of_three(ranks: int) -> None:
    run(
        lambda comm: check(comm, cells(["all_reduce"], FEW, ("sum",)), [0, 1, 7, 100]),
        ranks,
        cluster=SMALL_NODES,
    )


@pytest.mark.parametrize("ranks", (2, 3))
@pytest.mark.parametrize("operation", COLLECTIVES)
def test_buffers_of_several_segments(operation: str, ranks: int) -> None:
    elements = 2 * SEGMENT // 8 + 13

    def program(comm: Communicator) -> None:
        for algorithm in available(operation, comm):
            inputs = [draw(elements, "float64", rank) for rank in range(comm.size)]
            answer, mine = reduced(inputs, "sum"), inputs[comm.rank].copy()
            parts = np.array_split(answer, comm.size)
            if operation == "all_reduce":
                all_reduce(mine, comm, "sum", algorithm)
                np.testing.assert_allclose(mine, answer, rtol=1e-12, atol=1e-12)
            elif operation == "reduce":
                reduce(mine, comm, 0, "sum", algorithm)
                np.testing.assert_allclose(
                    mine, answer if comm.rank == 0 else inputs[comm.rank], atol=1e-12
                )
            elif operation == "reduce_scatter":
                shard = reduce_scatter(mine, comm, "sum", algorithm)
                np.testing.assert_allclose(shard, parts[comm.rank], rtol=1e-12, atol=1e-12)
            elif operation == "broadcast":
                broadcast(mine, comm, 1, algorithm)
                assert np.array_equal(mine, inputs[1])
            elif operation == "all_gather":
                assert np.array_equal(all_gather(parts[comm.rank], comm, None, algorithm), answer)
            elif operation == "gather":
                assert comm.rank != 1 or np.array_equal(
                    gather(parts[1], comm, 1, algorithm), answer
                )
                assert comm.rank == 1 or gather(parts[comm.rank], comm, 1, algorithm) is None
            elif operation == "scatter":
                shard = scatter(answer if comm.rank == 1 else None, comm, 1, algorithm)
                assert np.array_equal(shard, parts[comm.rank])
            else:
                everyones = [np.array_split(array, comm.size)[comm.rank] for array in inputs]
                assert np.array_equal(all_to_all(mine, comm, algorithm), np.concatenate(everyones))

    run(program, ranks)


@given(
    ranks=st.integers(1, 9),
    count=st.integers(0, 200),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(REDUCTIONS),
    seed=st.integers(0, 1 << 30),
    per_node=st.sampled_from([None, 1, 2, 3, 4]),
    debug=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_random_all_reduces_agree(
    ranks: int, count: int, dtype: str, op: str, seed: int, per_node: int | None, debug: bool
) -> None:
    if (op == "mean" and dtype not in ROUNDING) or (op in BITWISE and dtype in ROUNDING):
        op = "sum"
    cluster = Cluster(Link(1e-6, 1e9), Link(1e-5, 1e8), per_node)
    inputs = [draw(count, dtype, rank, seed) for rank in range(ranks)]

    def program(comm: Communicator) -> list[str]:
        digests = []
        for algorithm in available("all_reduce", comm):
            buffer = copied(inputs[comm.rank])
            all_reduce(buffer, comm, op, algorithm)
            digests.append(digest(buffer))
        return digests

    results = run(program, ranks, cluster=cluster, debug=debug)
    assert all(digests == results[0] for digests in results), "the ranks differ in bits"
    if dtype not in ROUNDING:
        assert len(set(results[0])) == 1, "the algorithms differ, on integers"


@pytest.mark.parametrize("ranks", (2, 3, 5, 8))
def test_signed_zeros_and_not_a_numbers_are_the_same_bits_on_all_ranks(ranks: int) -> None:
    special = np.array([0.0, -0.0, np.nan, -np.nan, np.inf, 1.0])
    columns = np.array(list(itertools.product(special, repeat=2))).T  # every pair of them

    def program(comm: Communicator) -> None:
        for op, algorithm in itertools.product(
            ("sum", "max", "min", "prod"), available("all_reduce", comm)
        ):
            buffer = np.roll(columns[comm.rank % 2], comm.rank // 2).copy()
            with np.errstate(invalid="ignore"):
                all_reduce(buffer, comm, op, algorithm)
            assert len(set(comm.all_gather_object(digest(buffer)))) == 1, (op, algorithm)

    run(program, ranks)


def test_auto_gives_the_same_bits_in_every_run() -> None:
    def program(comm: Communicator) -> str:
        buffer = draw(10_000, "float32", comm.rank)
        all_reduce(buffer, comm)
        return digest(buffer)

    assert len({digest for _ in range(5) for digest in run(program, 5)}) == 1


@pytest.mark.parametrize(
    ("ranks", "cluster"),
    [(5, None), (8, None), (9, Cluster.h100(2)), (16, Cluster.h100(2)), (4, Cluster.ethernet(4))],
)
def test_auto_chooses_alike_on_all_ranks_and_says_why(ranks: int, cluster: Cluster | None) -> None:
    def program(comm: Communicator) -> list[tuple[str, str]]:
        return [
            explain(operation, bytes, comm)
            for operation in COLLECTIVES
            for bytes in (0, 100, 1 << 15, 1 << 20, 1 << 30)
        ]

    results = run(program, ranks, cluster=cluster)
    assert all(choices == results[0] for choices in results)
    for operation, (name, why) in zip(np.repeat(list(COLLECTIVES), 5), results[0], strict=True):
        assert name in algorithms(operation) and len(why) > 10


def test_explaining_is_not_collective() -> None:
    run(lambda comm: comm.rank or explain("all_reduce", 1 << 20, comm), 9, cluster=Cluster.h100(2))


def test_what_a_slow_rank_still_reads_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    add_up = shared._add_up

    def late(copies: list[Any], out: Any, comm: Communicator, combine: Any) -> None:
        time.sleep(0.02 * comm.rank)  # the others are at the next all-reduce by then
        add_up(copies, out, comm, combine)

    def program(comm: Communicator) -> None:
        for step in range(4):
            buffer = np.full(3, 10.0**step)
            all_reduce(buffer, comm, algorithm="shared")
            assert (buffer == 2 * 10.0**step).all()

    monkeypatch.setattr(shared, "_add_up", late)
    run(program, 2)


def test_two_ranks_share_out_what_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    add = shared._add_others

    def late(mine: Any, everyones: Any, out: Any, comm: Communicator, combine: Any) -> None:
        time.sleep(0.01 * comm.rank)  # the other rank is done with its half by then
        add(mine, everyones, out, comm, combine)

    def program(comm: Communicator) -> None:
        handle_of = np.zeros(33_001, np.float32)
        handle = prepare("all_reduce", handle_of, comm, algorithm="shared")
        for dtype, length in ((np.float32, 33_001), (np.int64, 100_003), (torch.bfloat16, 300_000)):
            count = np.arange(length) % 100
            buffer: Any = torch.tensor(count, dtype=dtype) if dtype is torch.bfloat16 else None
            buffer = count.astype(dtype) if buffer is None else buffer
            buffer += comm.rank
            before = comm.traffic.bytes
            all_reduce(buffer, comm, algorithm="shared")
            assert (np.asarray(buffer.tolist()) == 2 * count + 1).all()
            half = length // 2 if comm.rank else length - length // 2
            assert comm.traffic.bytes - before == 2 * half * buffer.itemsize  # read, written
            handle_of[:] = comm.rank + 1
            handle()
            assert (handle_of == 3).all()

    monkeypatch.setattr(shared, "_add_others", late)
    run(program, 2)


def test_registered_buffers_are_reduced_in_place() -> None:
    def program(comm: Communicator) -> None:
        for dtype, length in itertools.product(
            (np.float32, np.int64, torch.bfloat16), (0, 1, 10, 5000, 300_000)
        ):
            memory = comm.allocate(length + 7, dtype)
            memory[:] = 1000
            memory[3 : length + 3] = comm.rank + 1
            all_reduce(memory[3 : length + 3], comm, algorithm="shared")
            total = comm.size * (comm.size + 1) // 2
            assert (memory[3 : length + 3] == total).all() and (memory[:3] == 1000).all()
            assert (memory[length + 3 :] == 1000).all()

    for ranks in (1, 2, 3, 4):
        run(program, ranks)


def test_registered_buffers_are_scattered_from_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add = shared._add_pieces

    def late(pieces: list[Any], out: Any, comm: Communicator, combine: Any) -> None:
        time.sleep(0.005 * comm.rank)  # the others would go on, and write, by then
        add(pieces, out, comm, combine)

    def program(comm: Communicator) -> None:
        for dtype, length in itertools.product((np.float32, torch.bfloat16), (5, 300_001)):
            memory = comm.allocate(length, dtype)
            handle = prepare("reduce_scatter", memory, comm, algorithm="shared")
            for scatter_again in (partial(reduce_scatter, memory, comm, "sum", "shared"), handle):
                memory[:] = comm.rank + 1
                before = comm.traffic.bytes
                shard: Any = scatter_again()
                memory[:] = 1000
                assert (shard == comm.size * (comm.size + 1) // 2).all()
                read = (comm.size - 1) * shard.nbytes
                assert comm.traffic.bytes - before == read
        assert shared.Staging not in comm.internal.kept, "nothing was copied into other memory"

    monkeypatch.setattr(shared, "_add_pieces", late)
    for ranks in (2, 3):
        run(program, ranks)


def test_registered_buffers_work_in_every_collective_and_on_streams() -> None:
    def program(comm: Communicator) -> None:
        memory, stream = comm.allocate(1000, np.float64), comm.stream()
        for algorithm in available("all_reduce", comm):
            memory[:] = comm.rank
            stream.launch(all_reduce, memory, stream.comm, "sum", algorithm).wait()
            assert (memory == 6).all(), algorithm
        for algorithm in available("broadcast", comm):
            memory[:] = comm.rank
            broadcast(memory, comm, 2, algorithm)
            assert (memory == 2).all(), algorithm
        half = comm.split(comm.rank % 2)
        memory[:] = comm.rank
        all_reduce(memory, half, algorithm="shared")  # registered among others than these ranks
        assert (memory == (2 if comm.rank % 2 == 0 else 4)).all()

    run(program, 4)


def test_memory_that_only_some_ranks_registered_is_named_in_debug_mode() -> None:
    def program(comm: Communicator) -> None:
        registered = comm.allocate(5000, np.float32)
        all_reduce(
            registered if comm.rank else np.zeros(5000, np.float32), comm, algorithm="shared"
        )

    with pytest.raises(MismatchError, match=r"rank 0 calls .*ordinary.*rank 1 calls .*registered"):
        run(program, 2, debug=True)


def test_collectives_on_a_stream_beside_others_on_the_main_thread() -> None:
    def program(comm: Communicator) -> None:
        stream = comm.stream()
        buffers = [np.full(2000, comm.rank + step, np.float64) for step in range(10)]
        handles = [stream.launch(all_reduce, buffer, stream.comm) for buffer in buffers]
        beside = np.full(3000, comm.rank, np.float64)
        all_reduce(beside, comm)
        for step, (buffer, handle) in enumerate(zip(buffers, handles, strict=True)):
            handle.wait()
            assert (buffer == 6 + 4 * step).all()
        assert (beside == 6).all()

    run(program, 4)


@pytest.mark.parametrize(("ranks", "elements"), [(1, 7), (2, 7), (3, 4), (5, 3), (4, 1001)])
def test_the_plain_ring_sends_what_the_fast_one_sends(ranks: int, elements: int) -> None:
    """Also the same bits, of numbers whose sum depends on the order."""

    def program(comm: Communicator, fast: bool) -> bytes:
        array = np.random.default_rng(comm.rank).normal(size=elements)
        if fast:
            all_reduce(array, comm, algorithm="ring")
        else:
            ring_all_reduce(np.array_split(array, comm.size), comm, operator.iadd)
        return array.tobytes()

    found = []
    for fast in (False, True):
        trace = Trace()
        results = run(lambda comm, fast=fast: program(comm, fast), ranks, trace=trace)
        events = sorted(
            (event for event in trace.events if event.kind == "send"), key=lambda event: event.start
        )
        assert len(events) == 2 * (ranks - 1) * ranks
        found.append(
            (
                results,
                [[(e.name, e.bytes) for e in events if e.rank == rank] for rank in range(ranks)],
            )
        )
    assert found[0] == found[1]


def test_the_fast_ring_keeps_two_temporaries_and_sends_a_segment_at_a_time() -> None:
    def program(comm: Communicator) -> tuple[int, int]:
        array = np.ones(3 * comm.size * SEGMENT // 8)
        all_reduce(array, comm, algorithm="ring")
        assert (array == comm.size).all()
        return comm.traffic.messages, sum(
            kept.nbytes for kept in comm.internal.keep(Temporaries, Temporaries).values()
        )

    assert run(program, 4) == [(3 * 6, 2 * SEGMENT)] * 4


def test_a_users_messages_never_mix_with_a_collectives() -> None:
    def program(comm: Communicator) -> None:
        mine, theirs = np.full(2, comm.rank, np.float64), np.empty(2)
        receive = comm.irecv(theirs, 1 - comm.rank)  # before the collective, the send after it
        total = np.full(4, comm.rank, np.float64)
        all_reduce(total, comm, algorithm="ring")
        comm.isend(mine, 1 - comm.rank)
        receive.wait()
        assert (total == 1).all() and (theirs == 1 - comm.rank).all()

    run(program, 2)


def test_scatter_tells_the_others_kind_and_shape() -> None:
    def program(comm: Communicator) -> tuple[str, tuple[int, ...]]:
        full = torch.arange(20, dtype=torch.bfloat16).reshape(10, 2) if comm.rank == 1 else None
        shard = scatter(full, comm, root=1)
        return str(shard.dtype), tuple(shard.shape)

    assert run(program, 3) == [
        ("torch.bfloat16", (4, 2)),
        ("torch.bfloat16", (3, 2)),
        ("torch.bfloat16", (3, 2)),
    ]


def test_meta_tensors_keep_their_shapes_through_all_collectives() -> None:
    def program(comm: Communicator) -> list[tuple[int, ...]]:
        def meta(*shape: int) -> torch.Tensor:
            return torch.empty(shape, device="meta")

        all_reduce(meta(10), comm, "mean")
        broadcast(meta(10), comm)
        reduce(meta(10), comm)
        gather(meta(10), comm)
        results = (
            all_gather(meta(2, 5), comm),
            reduce_scatter(meta(10, 2), comm),
            all_to_all(meta(8, 2), comm),
            scatter(meta(10, 3) if comm.rank == 0 else None, comm),
        )
        return [tuple(result.shape) for result in results]

    shapes = run(program, 4, cluster=Cluster.h100(1))
    assert shapes[0] == [(8, 5), (3, 2), (8, 2), (3, 3)]
    assert shapes[3] == [(8, 5), (2, 2), (8, 2), (2, 3)]


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([4, 4], "counts=[4, 4] must be 3 numbers of rows, one for each rank"),
        ([8, -1, 1], "counts=[8, -1, 1] must be 3 numbers of rows, one for each rank"),
        (
            [3, 3, 3],
            "counts=[3, 3, 3] add up to 9, but there are 8 rows: give every row to one rank",
        ),
    ],
)
def test_reduce_scatter_refuses_counts_that_cannot_be(
    counts: list[int], words: str, debug: bool
) -> None:
    def program(comm: Communicator) -> None:
        comm.debug = debug
        for algorithm in available("reduce_scatter", comm):
            with pytest.raises(ValueError) as error:
                reduce_scatter(np.ones((8, 2)), comm, algorithm=algorithm, counts=counts)
            assert str(error.value) == words
        assert comm.traffic.messages == 0

    run(program, 3)


def test_reduce_scatter_refuses_an_output_that_cannot_hold_the_shard() -> None:
    def program(comm: Communicator) -> None:
        full = np.ones(6)
        for out, words in (
            (
                np.ones(3),
                "an output of 3 elements (float64 on cpu) for a shard of 2 (float64 on cpu)",
            ),
            (
                np.ones(2, "float32"),
                "2 elements (float32 on cpu) for a shard of 2 (float64 on cpu)",
            ),
            (full[4:], "that is a part of the buffer to be reduced"),
            (full[:2], "that is a part of the buffer to be reduced"),
        ):
            with pytest.raises(ValueError, match=re.escape(words)):
                reduce_scatter(full, comm, out=out)
        assert comm.traffic.messages == 0

    run(program, 3)


def test_ranks_that_disagree_about_counts_are_told() -> None:
    def program(comm: Communicator) -> None:
        comm.debug = True
        reduce_scatter(np.ones(4), comm, counts=[4, 0] if comm.rank else [2, 2])

    with pytest.raises(
        MismatchError, match=r"rank 0 calls reduce_scatter\(.*counts=\[2, 2\].*counts=\[4, 0\]"
    ):
        run(program, 2)


def test_uneven_shards_that_are_gathered_give_the_reduction() -> None:
    """In segments, too: shards of more than a megabyte, and one that is empty."""

    def program(comm: Communicator) -> None:
        counts, whole = [300_001, 0, 7, 400_000], 700_008
        mine = np.arange(whole, dtype="float64") + comm.rank
        for algorithm in available("reduce_scatter", comm):
            shard = reduce_scatter(mine, comm, algorithm=algorithm, counts=counts)
            assert shard.shape == (counts[comm.rank],)
            assert np.array_equal(
                all_gather(shard, comm, counts=counts), 4 * np.arange(whole) + 6.0
            )

    run(program, 4)


@pytest.mark.parametrize("dim", (1, -1, 2))
@pytest.mark.parametrize("kind", (np.asarray, torch.from_numpy))
def test_shards_along_another_axis(kind: Callable[[Any], Any], dim: int) -> None:
    """As numpy cuts and joins them; uneven ones, too."""

    def program(comm: Communicator) -> None:
        whole = np.random.default_rng(0).standard_normal((3, 5, 7))
        mine = reduce_scatter(kind(whole * (comm.rank + 1)), comm, dim=dim)
        expected = np.array_split(6 * whole, 3, axis=dim)[comm.rank]
        np.testing.assert_allclose(np.asarray(mine), expected, rtol=1e-14)
        counts = [len(part) for part in np.array_split(range(whole.shape[dim]), 3)]
        for said in (None, counts):
            joined = all_gather(kind(np.ascontiguousarray(expected)), comm, counts=said, dim=dim)
            assert (np.asarray(joined) == 6 * whole).all() and type(joined) is type(mine)
        with pytest.raises(ValueError, match=f"out= is for dim=0: along dim={dim}"):
            all_gather(mine, comm, out=joined, dim=dim)
        with pytest.raises(ValueError, match=f"dim={dim} copies: prepare with dim=0"):
            prepare("all_gather", mine, comm, dim=dim)

    run(program, 3)
