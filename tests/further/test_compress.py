"""Compressed gradients: what is lost in one step is sent in a later one, and never for good."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import minidist
from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator
from minidist.full.ddp.compress.compressed import CompressedDDP
from minidist.full.ddp.compress.top_k import TopK
from minidist.full.ddp.data_parallel import DDP
from minidist.full.memory.account import Account
from minidist.further.compress import power_sgd
from minidist.further.compress.int8 import Int8
from minidist.further.compress.one_bit import OneBit
from minidist.further.compress.options import compressor_of
from minidist.further.compress.power_sgd import PowerSGD
from minidist.slow_wires import sparse_all_reduce

RANKS = 3
SHAPES = [(24, 16), (7,), (4, 3, 2, 5), (16, 20)]


def random_gradients(step: int, rank: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def reduced(
    comm: Communicator,
    columns: int,
    steps: int,
    gradients: Callable[[int, int], list[Tensor]] = random_gradients,
) -> tuple[list[Tensor], PowerSGD]:
    """Return what each step gave all ranks, flat, and the compressor."""
    parameters = [nn.Parameter(each) for each in gradients(0, 0)]
    compressor = PowerSGD(parameters, comm, columns)
    given = []
    for step in range(steps):
        mine = gradients(step, comm.rank)
        compressor.reduce(mine, comm)
        given.append(torch.cat([each.flatten() for each in mine]))
    return given, compressor


def total(step: int) -> Tensor:
    every = [random_gradients(step, rank) for rank in range(RANKS)]
    return torch.cat([sum(same[1:], same[0]).flatten() for same in zip(*every, strict=True)])


def test_what_was_sent_and_what_is_kept_back_are_all_gradients() -> None:
    """Fails without error feedback, and if the error of all ranks is kept in place of one's own."""
    steps = 5

    def program(comm: Communicator) -> tuple[Tensor, list[Tensor]]:
        given, compressor = reduced(comm, 2, steps)
        return sum(given[1:], given[0]), [each.tensor for each in compressor.remembered()][::2]

    results = minidist.run(program, RANKS)
    sent, sizes = results[0][0], [torch.Size(shape).numel() for shape in SHAPES]
    left = sum((total(step) for step in range(1, steps)), total(0)) - sent
    kept = [sum(rank[1][place] for rank in results).flatten() for place in range(3)]  # type: ignore[misc]
    pieces = left.split(sizes)
    for place, piece in zip((0, 2, 3), kept, strict=True):
        assert torch.allclose(pieces[place], piece, rtol=0, atol=1e-12)
        assert piece.norm() > 0.1 * pieces[place].numel() ** 0.5, "something was kept back"
    assert pieces[1].abs().max() < 1e-12, "a vector is sent as it is"
    assert all(torch.equal(result[0], sent) for result in results), "the same on every rank"


def test_as_many_columns_as_the_sum_has_dimensions_are_exact() -> None:
    def gradients(step: int, rank: int) -> list[Tensor]:
        """Of one dimension on each rank."""
        return [
            each if each.dim() < 2 else torch.outer(each.flatten(1)[:, 0], each.flatten(1)[0])
            for each in random_gradients(step, rank)
        ]

    def program(comm: Communicator) -> tuple[Tensor, list[Tensor]]:
        given, compressor = reduced(comm, RANKS, 2, gradients)
        return given[1], [each.tensor for each in compressor.remembered()][::2]

    expected = sum(
        torch.cat([each.flatten() for each in gradients(1, rank)]) for rank in range(RANKS)
    )
    for given, kept in minidist.run(program, RANKS):
        assert torch.allclose(given, expected, rtol=0, atol=1e-10)
        assert max(each.abs().max() for each in kept) < 1e-10


def test_full_rank_is_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power_sgd, "thin", _as_they_are)
    for given, _ in minidist.run(lambda comm: reduced(comm, 99, 2), RANKS):
        assert torch.allclose(given[1], total(1), rtol=0, atol=1e-10)


def _as_they_are(parameter: Tensor, rank: int) -> tuple[int, int, int] | None:
    if parameter.dim() < 2:
        return None
    n, m = parameter.flatten(1).shape
    return n, m, min(n, m)


def test_the_warm_start_finds_the_best_factors() -> None:
    """Of a gradient that stays, whatever was kept back forgotten: without the last factor each step
    would be as far off as the first.
    """
    matrix = total(0)[: 24 * 16].view(24, 16)
    best = float(torch.linalg.svd(matrix)[1][2:].norm())

    def program(comm: Communicator) -> list[float]:
        parameters = [nn.Parameter(torch.zeros(24, 16, dtype=torch.float64))]
        compressor, off = PowerSGD(parameters, comm, 2), []
        for _ in range(40):
            gradient = random_gradients(0, comm.rank)[0]
            compressor.reduce([gradient], comm)
            compressor.matrices[0].kept.zero_()
            off.append(float((matrix - gradient).norm()))
        return off

    for off in minidist.run(program, RANKS):
        assert off[0] > 1.05 * best and off[-1] == pytest.approx(best, rel=1e-3)


def test_an_overflow_changes_nothing_that_is_kept() -> None:
    def gradients(step: int, rank: int) -> list[Tensor]:
        every = random_gradients(step, rank, torch.float16)
        if step == 1 and rank == 1:
            every[0][3, 3] = torch.inf
        return every

    def program(comm: Communicator) -> tuple[list[Tensor], list[list[Tensor]]]:
        given, after = [], []
        for steps in (1, 2):
            flats, compressor = reduced(comm, 2, steps, gradients)
            given.append(flats[-1])
            after.append([each.tensor.clone() for each in compressor.remembered()])
        return given, after

    for given, (before, after) in minidist.run(program, RANKS):
        assert given[0].isfinite().all() and given[1].isnan().all()
        assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


# ---------------------------------------------------------------- top-k


def rows_of(rank: int) -> list[Tensor]:
    table = [[0.1, -3.0, 0.2, 1.0], [2.0, 0.3, 0.1, -4.0]]
    return [torch.tensor(table[rank][:3]), torch.tensor(table[rank][3:])]


def test_an_index_that_several_ranks_send_adds_up() -> None:
    def program(comm: Communicator) -> tuple[Tensor, Tensor, int]:
        mine = rows_of(comm.rank)
        compressor = TopK([nn.Parameter(each) for each in mine], 0.5)
        before = comm.traffic.bytes
        compressor.reduce(mine, comm)
        sent = comm.traffic.bytes - before
        assert sent == compressor.sent(comm.size) == 2 * (4 + 4)
        return torch.cat(mine), compressor.kept

    (given, kept), (other, _) = minidist.run(program, 2)
    assert given.tolist() == other.tolist() == [2.0, -3.0, 0.0, -3.0]
    assert kept.tolist() == pytest.approx([0.1, 0.0, 0.2, 0.0])


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_nothing_is_lost_by_top_k(share: float) -> None:
    def program(comm: Communicator) -> tuple[Tensor, Tensor]:
        compressor = TopK([nn.Parameter(each) for each in random_gradients(0, 0)], share)
        given = []
        for step in range(5):
            mine = random_gradients(step, comm.rank)
            compressor.reduce(mine, comm)
            given.append(torch.cat([each.flatten() for each in mine]))
        return sum(given[1:], given[0]), compressor.kept

    results = minidist.run(program, RANKS)
    kept = sum((result[1] for result in results[1:]), results[0][1])
    expected = sum((total(step) for step in range(1, 5)), total(0))
    assert torch.allclose(results[0][0] + kept, expected, rtol=0, atol=1e-12)
    assert bool(kept.any()) == (share < 1)


def test_the_plain_page_sends_and_keeps_the_same() -> None:
    def program(comm: Communicator) -> None:
        compressor = TopK([nn.Parameter(each) for each in random_gradients(0, 0)], 0.1)
        kept = torch.zeros_like(compressor.kept)
        for step in range(4):
            mine = random_gradients(step, comm.rank)
            flat = torch.cat([each.flatten() for each in mine])
            compressor.reduce(mine, comm)
            before = comm.traffic.bytes
            sparse_all_reduce(flat, kept, compressor.count, comm)
            assert comm.traffic.bytes - before == compressor.sent(comm.size)
            assert torch.equal(flat, torch.cat([each.flatten() for each in mine]))
            assert torch.equal(kept, compressor.kept)

    minidist.run(program, RANKS)


def test_kept_velocities_are_those_of_momentum() -> None:
    """All elements sent: SGD with what comes is SGD with momentum, as long as nothing is masked."""
    momentum, steps = 0.9, 4

    def program(comm: Communicator) -> tuple[list[Tensor], Tensor]:
        compressor = TopK([nn.Parameter(torch.zeros(8))], 1 / 8, momentum)
        given = []
        for _ in range(steps):
            mine = [torch.arange(8.0)]
            compressor.reduce(mine, comm)
            given.append(mine[0])
        return given, compressor.kept

    for given, kept in minidist.run(program, 1):
        # element 7 is sent in step 1; 6 has waited for the second step, with a velocity of 1.9 and
        # 1 more from the first
        assert [int(each.nonzero()[0, 0]) for each in given] == [7, 6, 5, 7]
        assert given[0][7] == 7 and given[1][6] == pytest.approx(6 * (1 + 1.9))
        # element 7 began again with a velocity of 7: then 13.3, and 18.97
        assert given[3][7] == pytest.approx(7 + 13.3 + 18.97)
        # element 1 was never sent: velocities 1, 1.9, 2.71, 3.439
        assert kept[1] == pytest.approx(1 + 1.9 + 2.71 + 3.439)


# ---------------------------------------------------------------- signs, and 8 bits


def test_nothing_is_lost_by_signs() -> None:
    """Neither of a rank's own gradient, nor of the sums: 5 ranks, sizes that fill no block."""
    ranks = 5

    def program(comm: Communicator) -> tuple[Tensor, Tensor]:
        compressor = OneBit([nn.Parameter(each) for each in random_gradients(0, 0)], comm.size)
        given = []
        for step in range(4):
            mine = random_gradients(step, comm.rank)
            before = comm.traffic.bytes
            compressor.reduce(mine, comm)
            assert comm.traffic.bytes - before == compressor.sent(comm.size)
            given.append(torch.cat([each.flatten() for each in mine]))
        return sum(given[1:], given[0]), compressor.kept

    results = minidist.run(program, ranks)
    kept = sum((result[1] for result in results[1:]), results[0][1])
    expected = torch.zeros_like(kept)
    for step in range(4):
        for rank in range(ranks):
            expected += torch.cat([each.flatten() for each in random_gradients(step, rank)])
    assert torch.allclose(results[0][0] + kept, expected, rtol=0, atol=1e-12)
    assert all(torch.equal(result[0], results[0][0]) for result in results)


def test_signs_that_are_kept_lead_where_gradients_lead() -> None:
    """A small element beside a large one: without what is kept its steps would be as large."""
    goal = torch.tensor([1.0, 0.001] * 128)

    def program(comm: Communicator) -> Tensor:
        weight = torch.zeros(256)
        compressor = OneBit([nn.Parameter(weight)], comm.size)
        for _ in range(400):
            gradient = [(weight - goal) / comm.size]
            compressor.reduce(gradient, comm)
            weight = weight - 0.05 * gradient[0]
        return weight

    for weight in minidist.run(program, 2):
        assert (weight - goal).abs().max() < 0.02


def test_the_error_of_8_bits_does_not_grow_with_the_ranks() -> None:
    def error(ranks: int) -> float:
        def program(comm: Communicator) -> float:
            mine = [torch.randn(4096, generator=torch.Generator().manual_seed(comm.rank))]
            exact = mine[0].double()
            all_reduce(exact, comm)
            before = comm.traffic.bytes
            compressor = Int8([nn.Parameter(mine[0])], comm.size)
            compressor.reduce(mine, comm)
            assert comm.traffic.bytes - before == compressor.sent(comm.size)
            assert len(set(comm.all_gather_object(float(mine[0].sum())))) == 1, (
                "the same on every rank"
            )
            return float((mine[0] - exact).norm() / exact.norm())

        return minidist.run(program, ranks)[0]

    errors = [error(ranks) for ranks in (2, 4, 16)]
    assert max(errors) < 1.1 * min(errors) < 0.02


# ---------------------------------------------------------------- a model


def model_of() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3), nn.Linear(3, 40), nn.Linear(40, 30, bias=False), nn.Linear(30, 1)]
    return nn.Sequential(*layers).double()


def gradients_of(replica: DDP, comm: Communicator) -> tuple[list[Tensor], int]:
    """Return the gradients of a step, and the bytes sent for them."""
    before = comm.traffic.bytes
    generator = torch.Generator().manual_seed(comm.rank)
    inputs = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    replica(inputs).square().sum().backward()
    gradients = [parameter.grad for parameter in replica.module.parameters()]
    return [each.clone() for each in gradients if each is not None], comm.traffic.bytes - before


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_buckets_that_are_not_full_are_sent(op: str) -> None:
    """With so many columns that all is sent as it is, gradients are those of DDP."""

    serial = model_of()

    def program(comm: Communicator) -> None:
        sizes = {"bucket_bytes": 300, "first_bucket_bytes": 20}
        many, few = compressor_of("powersgd:64"), compressor_of("powersgd:2")
        plain, _ = gradients_of(DDP(copy.deepcopy(serial), comm, op, **sizes), comm)
        exact, _ = gradients_of(
            CompressedDDP(copy.deepcopy(serial), comm, op, compress=many, **sizes), comm
        )
        for ours, theirs in zip(exact, plain, strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
        compressed = CompressedDDP(copy.deepcopy(serial), comm, op, compress=few, **sizes)
        gradients, sent = gradients_of(compressed, comm)
        assert sent == compressed.volume(1)[1]
        # of 1,200 elements 140 travel, and of 120 elements 86; the rest as they are
        assert sent == 8 * (12 + 40 + 86 + 140 + 31)
        sums = comm.all_gather_object([float(each.sum()) for each in gradients])
        assert all(each == sums[0] for each in sums)

    minidist.run(program, 2)


@pytest.mark.parametrize("way", ["powersgd:2", "topk:0.1", "topk:0.1:0.9", "1bit", "int8"])
def test_what_is_kept_is_counted_with_the_gradients(way: str) -> None:
    serial = model_of()
    whole = sum(parameter.nbytes for parameter in serial.parameters())
    matrices = 8 * (40 * 30 + 3 * 40)
    expected = {"powersgd:2": matrices, "topk:0.1:0.9": 2 * whole, "int8": 0}.get(way, whole)

    def program(comm: Communicator) -> tuple[int, int]:
        compression = compressor_of(way)
        model = copy.deepcopy(serial)
        replica = CompressedDDP(model, comm, "sum", compress=compression)
        account = Account()
        account.watch(replica, comm=comm)
        before = account.sample()["gradients"]
        gradients_of(replica, comm)
        return before, account.sample()["gradients"] - before

    assert minidist.run(program, 2) == [(expected, whole)] * 2
