"""Every collective on 1 to 8 ranks, arrays and tensors, any size: values, bits, bytes."""

from typing import Any

import numpy as np
import pytest
import torch

from minidist import collectives as C
from minidist.comm import Communicator, copy, empty_like
from minidist.threads import run

ALGORITHMS = ("ring", "recursive", "tree", "naive")


def data_of(rank: int, elements: int, tensor: bool) -> Any:
    array = np.random.default_rng(rank).standard_normal(elements)
    return torch.from_numpy(array) if tensor else array


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(("elements", "tensor"), [(1, False), (7, True), (24, False)])
def test_values_and_bits(ranks: int, elements: int, tensor: bool) -> None:
    everyones = [np.asarray(data_of(rank, elements, False)) for rank in range(ranks)]
    wanted = {"sum": sum(everyones), "max": np.max(everyones, 0), "min": np.min(everyones, 0)}
    wanted["mean"] = wanted["sum"] / ranks

    def program(comm: Communicator) -> list[bytes]:
        ends, own = [], data_of(comm.rank, elements, tensor)
        chunks = np.array_split(wanted["sum"], ranks)
        for algorithm in ALGORITHMS:
            for op in ("sum", "mean", "max", "min"):
                buffer = copy(own)
                C.all_reduce(buffer, comm, op, algorithm)
                np.testing.assert_allclose(np.asarray(buffer), wanted[op])
                ends.append(np.asarray(buffer).tobytes())
        for algorithm in ("ring", "recursive"):
            shard = C.reduce_scatter(own, comm, "sum", algorithm)
            np.testing.assert_allclose(np.asarray(shard), chunks[comm.rank])
        whole = C.all_gather(shard, comm, out=empty_like(own, elements))
        np.testing.assert_allclose(np.asarray(whole), wanted["sum"])
        for root in range(ranks):
            buffer = copy(own)
            C.broadcast(buffer, comm, root)
            assert np.array_equal(np.asarray(buffer), everyones[root])
            C.reduce(total := copy(own), comm, root)
            found = C.gather(shard, comm, root, out=empty_like(own, elements))
            C.scatter(place := copy(shard), comm, root, buffer=own)
            assert np.array_equal(place, np.array_split(everyones[root], ranks)[comm.rank])
            assert (found is None) == (comm.rank != root)
            if comm.rank == root:
                np.testing.assert_allclose(np.asarray(total), wanted["sum"])
                np.testing.assert_allclose(np.asarray(found), wanted["sum"])
        assert np.array_equal(np.asarray(own), everyones[comm.rank]), "inputs stay as they are"
        assert C.all_gather_object(("rank", comm.rank), comm) == [("rank", r) for r in range(ranks)]
        return ends

    assert len({tuple(ends) for ends in run(program, ranks)}) == 1, "the same bits on every rank"


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_all_to_all_of_uneven_parts(ranks: int) -> None:
    def program(comm: Communicator) -> None:
        leaving = [(comm.rank + to) % 3 for to in range(ranks)]
        arriving = [(source + comm.rank) % 3 for source in range(ranks)]
        parts = [np.full(count, 10 * comm.rank + to) for to, count in enumerate(leaving)]
        found = C.all_to_all(np.concatenate(parts), comm, leaving, arriving)
        wanted = [np.full(n, 10 * source + comm.rank) for source, n in enumerate(arriving)]
        assert np.array_equal(found, np.concatenate(wanted))

    run(program, ranks)


def test_all_to_all_of_a_length_that_ranks_do_not_divide() -> None:
    def program(comm: Communicator) -> list[int]:
        found: list[int] = C.all_to_all(10 * comm.rank + np.arange(5), comm).tolist()
        return found

    assert run(program, 3) == [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23], [4, 14, 24]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda comm: C.all_reduce(np.zeros((4, 4))[:, 0], comm), "not contiguous"),
        (lambda comm: C.all_reduce(torch.zeros(4, 4).T[:2], comm), "not contiguous"),
        (lambda comm: C.all_reduce(np.zeros(4), comm, algorithm="rings"), "use ring"),
        (lambda comm: C.reduce_scatter(np.zeros(4), comm, algorithm="tree"), "use ring"),
        (lambda comm: C.all_reduce(np.zeros(4), comm, "product"), "use sum"),
    ],
)
def test_a_wrong_call_is_named(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(call, 2)


def test_bytes_and_messages_are_those_of_the_table() -> None:
    ranks, size = 8, 8 * 64

    def program(comm: Communicator) -> dict[str, tuple[int, int]]:
        found = {}

        def counted(name: str, call: Any, *arguments: Any) -> None:
            messages, sent = comm.traffic.messages, comm.traffic.bytes
            call(*arguments)
            found[name] = (comm.traffic.messages - messages, comm.traffic.bytes - sent)

        for algorithm in ALGORITHMS:
            counted(algorithm, C.all_reduce, np.ones(64), comm, "sum", algorithm)
        for algorithm in ("ring", "recursive"):
            counted(f"scatter {algorithm}", C.reduce_scatter, np.ones(64), comm, "sum", algorithm)
        counted("gather", C.all_gather, np.ones(8), comm)
        counted("all to all", C.all_to_all, np.ones(64), comm)
        counted("broadcast", C.broadcast, np.ones(64), comm)
        return found

    first, *_, last = run(program, ranks)
    share = size * 7 // 8
    assert first["ring"] == (14, 2 * share)
    assert first["recursive"] == (3, 3 * size)
    assert first["tree"] == (3, 3 * size) and last["tree"] == (1, size)
    assert first["naive"] == (7, 7 * size) and last["naive"] == (1, size)
    assert first["scatter ring"] == (7, share) and first["scatter recursive"] == (3, share)
    assert first["gather"] == (7, share) and first["all to all"] == (7, share)
    assert first["broadcast"] == (3, 3 * size) and last["broadcast"] == (0, 0)


def test_little_crosses_the_nodes_when_it_is_hierarchical() -> None:
    def program(comm: Communicator) -> tuple[int, int]:
        inside, across = comm.split(comm.rank // 4), comm.split(comm.rank % 4)
        buffer = np.full(64, comm.rank, float)
        C.hierarchical_all_reduce(buffer, inside, across)
        assert (buffer == 28).all()
        return inside.traffic.bytes, across.traffic.bytes

    assert set(run(program, 8)) == {(2 * 3 * 128, 2 * 64)}
