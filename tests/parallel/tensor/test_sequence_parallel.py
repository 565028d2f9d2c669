"""Sequence parallelism: the serial numbers, the bytes of tensor parallelism, fewer activations;
what norms need.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from data_parallel import largest_difference
from test_tensor_parallel import (
    LONG,
    PLANS,
    ROWS,
    VARIANTS,
    batch,
    build,
    check_plan,
    check_run,
    config,
    gradients,
    loss_of,
    refused,
    ring,
    traffic_of_parts,
)
from torch import Tensor

import minidist
from minidist.full import clip_by_global_norm
from minidist.full.comm import Communicator
from minidist.full.model import Where
from minidist.full.model.dropout import Dropout, dropout_mask
from minidist.full.placement import placement_of
from minidist.full.tensor import plan as tensor_plan
from minidist.full.tensor.plan import parallelize_tensor
from minidist.full.tensor.sequence import split_dropout
from minidist.full.tensor.styles import ColumnParallel, SplitSequence, VocabularyParallel


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parity(ranks: int, changes: dict[str, Any]) -> None:
    check_run(ranks, config(**changes), sequence=True)


def test_parity_with_a_frozen_embedding_and_the_norm_of_all_gradients() -> None:
    model = build(config(), 0)
    model.embedding.weight.requires_grad_(False)
    loss_of(model, None).backward()
    expected = gradients(model)
    norm = torch.linalg.vector_norm(
        torch.stack([gradient.norm() for gradient in expected.values()])
    )

    def program(comm: Communicator) -> None:
        split = build(config(), comm.rank)
        split.embedding.weight.requires_grad_(False)
        parallelize_tensor(split, comm, sequence=True)
        loss_of(split, comm).backward()
        assert clip_by_global_norm(split.parameters(), 0, comm).item() == pytest.approx(
            norm.item(), rel=1e-12
        )
        found = {}
        for name, gradient in gradients(split).items():
            placement = placement_of(split.get_parameter(name)).block
            assert placement is not None
            found[name] = placement.full(gradient)
        assert largest_difference(found, expected) <= 1e-9

    minidist.run(program, 4, debug=True)


# ---------------------------------------------------------------- why norms need a sum


def test_without_the_sum_each_rank_has_its_own_tokens_terms_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If it is forgotten there is no error, every matrix is right, and every norm weight wrong."""
    model = build(config(), 0)
    loss_of(model, None).backward()
    expected = gradients(model)

    def program(comm: Communicator) -> dict[str, Tensor]:
        split = build(config(), 0)
        parallelize_tensor(split, comm, sequence=True)
        loss_of(split, comm).backward()
        found = {}
        for name, gradient in gradients(split).items():
            placement = placement_of(split.get_parameter(name)).block
            assert placement is not None
            found[name] = placement.full(gradient) if placement.dim is not None else gradient
        return found

    def wrong(found: dict[str, Tensor]) -> set[str]:
        return {
            name
            for name, b in expected.items()
            if (found[name] - b).abs().max() > 1e-9 * b.abs().max()
        }

    norms = {name for name in expected if "norm" in name}
    assert all(not wrong(found) for found in minidist.run(program, 2))
    monkeypatch.setattr(tensor_plan, "sum_gradient", lambda parameter, comm: None)
    alone = minidist.run(program, 2)
    assert [wrong(found) for found in alone] == [norms, norms]
    for name in norms:  # the two together are the whole: each has the terms of its own tokens
        total = alone[0][name] + alone[1][name]
        assert torch.allclose(total, expected[name], rtol=1e-9, atol=1e-12)


def test_parity_fails_without_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_plan, "sum_gradient", lambda parameter, comm: None)
    with pytest.raises(AssertionError):
        check_run(2, config(), sequence=True)


# ---------------------------------------------------------------- masks


def test_the_mask_is_the_slice_of_the_serial_one() -> None:
    where = Where(seed=3, step=2, rows=5, positions=torch.tensor([9, 1, 4, 7, 0, 2]))
    shape = torch.Size((2, 6, 5))
    expected = dropout_mask(shape, 0.5, 1, where, torch.device("cpu"))

    def program(comm: Communicator) -> Tensor:
        dropout = Dropout(0.5, site=1)
        split_dropout(dropout, comm)
        kept = dropout(torch.ones(2, 6 // comm.size, 5), where)
        return kept == 0

    for ranks in (1, 2, 3, 6):
        assert torch.equal(torch.cat(minidist.run(program, ranks), dim=1), expected)


# ---------------------------------------------------------------- what it sends


@pytest.mark.parametrize("ranks", [2, 4])
def test_as_many_bytes_as_tensor_parallelism(ranks: int) -> None:
    split, plain = (
        minidist.run(lambda comm, s=s: traffic_of_parts(comm, s), ranks)[0] for s in (True, False)
    )
    messages, bytes = ring(ranks, ROWS * 64 * 32 * 8)
    half = messages // 2, bytes // 2
    for name in ("attention forward", "attention backward", "mlp forward", "mlp backward"):
        assert split[name] == (messages, bytes) == plain[name]
    # reduce-scatter; all-gather
    assert split["embedding forward"] == split["embedding backward"] == half
    assert plain["embedding forward"] == (messages, bytes)
    # all-gather; reduce-scatter
    assert split["head forward"] == split["head and loss backward"] == half
    assert split["loss forward"] == plain["loss forward"]


def test_besides_only_the_norms_gradients_travel() -> None:
    """Of a whole step: sequence parallelism sends what tensor parallelism sends, and a vector for
    each norm.
    """
    sizes = config(**LONG)

    def program(comm: Communicator, sequence: bool) -> int:
        model = build(sizes, 0)
        parallelize_tensor(model, comm, sequence=sequence)
        tokens = torch.zeros((ROWS, 64), dtype=torch.int64)
        before = comm.traffic.bytes
        model(tokens).sum().backward()
        return comm.traffic.bytes - before

    plain, split = (sum(minidist.run(lambda comm, s=s: program(comm, s), 2)) for s in (False, True))
    trained_norms = 2 * sizes.layers + 1 - 1
    assert split - plain == 2 * trained_norms * 32 * 8


# ---------------------------------------------------------------- what it holds


def kept(comm: Communicator, sequence: bool) -> int:
    """Return the bytes of activations that autograd keeps in the layers, each memory once, without
    parameters.
    """
    sizes = config(**(LONG | {"dropout": 0.1, "layers": 1}))
    model = build(sizes, 0).requires_grad_(True)
    parallelize_tensor(model, comm, sequence=sequence)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}
    alive = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    x = torch.randn(
        (ROWS, 64 // (comm.size if sequence else 1), 32), dtype=torch.float64, requires_grad=True
    )
    rotary = model.rotary(torch.arange(64), torch.float64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.layers[0](x, rotary, Where())
    return sum(held.values())


@pytest.mark.parametrize("ranks", [2, 4])
def test_activations_between_regions_are_held_in_part(ranks: int) -> None:
    plain, split = (minidist.run(lambda comm, s=s: kept(comm, s), ranks)[0] for s in (False, True))
    numbers = ROWS * 64 * 32
    # For each of attention and MLP: the residual stream, its normalised copy, a byte of mask for
    # each number, and the reciprocal root of each token. What lies inside the regions, their
    # gathered inputs too, is the same in both.
    between = 2 * (8 * numbers + 8 * numbers + numbers + 8 * ROWS * 64)
    assert plain - split == between * (ranks - 1) // ranks


# ---------------------------------------------------------------- plans and mistakes


@pytest.mark.parametrize("words", [VocabularyParallel(), SplitSequence()])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_plan_of_ones_own(ranks: int, words: VocabularyParallel | SplitSequence) -> None:
    """With biases, and an embedding that all ranks hold whole and whose output is split."""
    plan = {**PLANS["all"], "words": words, "out": ColumnParallel(gather=True)}
    minidist.run(lambda comm: check_plan(comm, plan, sequence=True), ranks, debug=True)


def test_a_sequence_that_cannot_be_split_is_told() -> None:
    def program(comm: Communicator) -> None:
        model = build(config(), 0)
        parallelize_tensor(model, comm, sequence=True)
        with pytest.raises(
            ValueError, match=r"7 tokens in a row cannot be split evenly over 2 ranks: .* such as 6"
        ):
            model(batch(0, 19)[:, :7])

    minidist.run(program, 2)
    assert "nothing in the plan splits the sequence" in refused(
        {"head": ColumnParallel()}, sequence=True
    )
