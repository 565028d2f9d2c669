"""NF4, LoRA and QLoRA: what the papers promise, in bits, bytes and numbers."""

from __future__ import annotations

import pickle
import weakref
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from data_parallel import CONFIG, DROPPING, largest_difference
from torch import Tensor, nn

import minidist
from minidist.full import DDP, ColumnParallel, parallelize_tensor
from minidist.full.adapters.lora import EVERY_MATRIX, LoRALinear, add_lora, merge
from minidist.full.comm import Communicator
from minidist.full.ddp.sampler import share
from minidist.full.model import GPT, GPTConfig, Where, cross_entropy_sum
from minidist.full.placement import placement_of
from minidist.full.tensor.plan import gpt_plan
from minidist.further.nf4 import qlora
from minidist.further.nf4.nf4 import dequantize, levels, quantize
from minidist.further.nf4.qlora import QuantizedLinear, add_qlora

PUBLISHED = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
EACH_KIND = pytest.mark.parametrize("add", (add_lora, add_qlora), ids=("lora", "qlora"))
TOKENS = torch.randint(19, (4, 9), generator=torch.Generator().manual_seed(3))


def build(config: GPTConfig = CONFIG, seed: int = 0) -> GPT:
    return GPT(config, torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(model: nn.Module, tokens: Tensor = TOKENS, **where: int) -> Tensor:
    return cross_entropy_sum(model(tokens[:, :-1], Where(**where)), tokens[:, 1:]) / 32  # type: ignore[arg-type]


def adapters_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def train(model: nn.Module, rows: slice = slice(0, 4), steps: int = 3) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for step in range(steps):
        model.zero_grad()
        loss_of(model, TOKENS[rows], step=step, rows=rows.start).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


# ---------------------------------------------------------------- NF4


def test_the_levels_are_the_published_ones() -> None:
    assert levels() == pytest.approx(PUBLISHED, abs=1e-6)
    assert levels()[7] == 0.0


@pytest.mark.parametrize("size", (0, 1, 2, 63, 64, 65, 129, 64 * 256 - 1, 64 * 256 + 1))
@pytest.mark.parametrize("outliers", (False, True))
def test_an_error_is_at_most_half_the_widest_gap_of_its_block(size: int, outliers: bool) -> None:
    weights = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 0.02
    if outliers and size:
        weights[size // 2] = 7.0  # one scale far from the others
    packed = quantize(weights)
    error = (dequantize(packed) - weights).abs()
    padded = nn.functional.pad(weights, (0, -size % 64)).view(-1, 64)
    largest = padded.abs().amax(1).repeat_interleave(64)[:size]
    step = packed.steps.repeat_interleave(64 * 256)[:size]
    gap = max(b - a for a, b in pairwise(PUBLISHED))
    assert (error <= (largest + step) * gap / 2 + 1e-7).all()
    if size > 100:
        assert error.max() > largest.min() * gap / 4, "as coarse as four bits are"


def test_each_level_comes_back_as_itself() -> None:
    # 80: every block has the same scale
    weights = torch.tensor(levels(), dtype=torch.float64).roll(3).repeat(5)
    assert (dequantize(quantize(weights), torch.float64) - weights).abs().max() < 1e-6


def test_zeros_stay_zeros() -> None:
    weights = torch.randn(10, 100)
    weights[3:6] = 0  # whole blocks, among others that are not
    weights[:, 7] = 0
    restored = dequantize(quantize(weights))
    assert restored.shape == weights.shape
    assert (restored[weights == 0] == 0).all()
    assert (dequantize(quantize(torch.zeros(200))) == 0).all()


def test_the_constants_cost_an_eighth_of_a_bit() -> None:
    count = 64 * 256 * 8
    packed = quantize(torch.randn(count))
    bits = 8 * (packed.nbytes - packed.mean.nbytes) / count
    assert bits == 4 + 8 / 64 + 32 / (64 * 256)
    assert bits - 4 == pytest.approx(0.127, abs=5e-4)


def test_what_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="infinite or not a number"):
        quantize(torch.tensor([1.0, float("nan")]))


# ---------------------------------------------------------------- adapters


def test_an_untrained_adapter_changes_no_bit() -> None:
    model = build()
    before = model(TOKENS[:, :-1])
    add_lora(model, targets=("*",))
    assert torch.equal(model(TOKENS[:, :-1]), before)


@EACH_KIND
def test_an_adapter_is_scaled_by_alpha_over_rank(add: Any) -> None:
    model, x = (
        build(),
        torch.randn(5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
    )
    add(model, rank=2, alpha=6, targets=("query",))
    adapter = model.layers[0].attention.query
    assert isinstance(adapter, LoRALinear)
    nn.init.ones_(adapter.B)
    torch.testing.assert_close(adapter(x) - adapter.base(x), 6 / 2 * x @ (adapter.B @ adapter.A).T)


@EACH_KIND
def test_only_adapters_are_trained(add: Any) -> None:
    model = build()
    add(model, rank=2, targets=("query", "down"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(model)
    changed = {
        name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])
    }
    adapters = {
        f"layers.{i}.{name}.{half}"
        for i in (0, 1)
        for name in ("attention.query", "mlp.down")
        for half in "AB"
    }
    assert changed == adapters_of(model).keys() == adapters
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == 2 * 2 * (16 + 16 + 24 + 16)


@EACH_KIND
def test_merging_leaves_plain_layers_and_the_same_outputs(add: Any) -> None:
    model = build()
    names = [name for name, _ in model.named_parameters()]
    add(model, targets=("layers.0.*", "output"))
    train(model)
    trained = model(TOKENS[:, :-1])
    merge(model)
    assert [name for name, _ in model.named_parameters()] == names
    assert not any(isinstance(module, LoRALinear | QuantizedLinear) for module in model.modules())
    assert type(model.layers[0].attention.query) is nn.Linear
    assert (model(TOKENS[:, :-1]) - trained).abs().max() < 1e-12


def test_a_tied_head_merges_without_touching_the_embedding() -> None:
    model = build()
    embedding = model.embedding.weight.detach().clone()
    add_lora(model, targets=("head",))
    train(model)
    trained = model(TOKENS[:, :-1])
    merge(model)
    assert torch.equal(model.embedding.weight, embedding)
    assert (model(TOKENS[:, :-1]) - trained).abs().max() < 1e-12


def test_a_layer_that_stands_in_two_places_keeps_one_adapter_and_its_bias() -> None:
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    add_lora(model, targets=("0",))
    assert model[0] is model[2] and isinstance(model[0], LoRALinear)
    merge(model)
    assert model[0] is model[2] and model[0].bias is shared.bias


def test_adapters_are_saved_and_loaded_alone() -> None:
    model, other = build(), build()
    add_lora(model)
    add_lora(other, generator=torch.Generator().manual_seed(9))
    train(model)
    assert not torch.equal(model(TOKENS[:, :-1]), other(TOKENS[:, :-1]))
    other.load_state_dict(adapters_of(model), strict=False)
    assert torch.equal(model(TOKENS[:, :-1]), other(TOKENS[:, :-1]))


def test_mistakes_are_named_and_change_nothing() -> None:
    model = build()
    with pytest.raises(
        ValueError,
        match="'qeury'; the model's are called query, key, value, output, gate, up, down, head",
    ):
        add_lora(model, targets=("value", "qeury"))
    with pytest.raises(ValueError, match="rank=0"):
        add_lora(model, rank=0)
    assert all(parameter.requires_grad for parameter in model.parameters())
    add_lora(model)
    with pytest.raises(ValueError, match="adapters already"):
        add_lora(model, targets=("key",))


# ---------------------------------------------------------------- QLoRA


def test_a_quantised_layer_computes_with_the_dequantised_weight() -> None:
    linear = nn.Linear(70, 50).double()
    quantised = QuantizedLinear(linear)
    weight = dequantize(quantised.packed, torch.float64)
    inputs = torch.randn(3, 5, 70, dtype=torch.float64, requires_grad=True)
    assert torch.equal(quantised(inputs), nn.functional.linear(inputs, weight) + linear.bias)
    assert torch.autograd.gradcheck(quantised, inputs, fast_mode=True)


def test_autograd_keeps_nothing_of_the_weight() -> None:
    quantised = QuantizedLinear(nn.Linear(512, 512))
    kept: list[int] = []

    def count(tensor: Tensor) -> Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        quantised(torch.randn(2, 512, requires_grad=True)).sum().backward()
    assert sum(kept) <= 2 * 512 * 4
    assert sum(
        p.nbytes for p in quantised.parameters() if p is not quantised.bias
    ) * 8 / 512**2 == pytest.approx(4.127, abs=1e-3)


def test_converting_a_model_rounds_no_scale() -> None:
    quantised = QuantizedLinear(nn.Linear(64, 64))
    before = dequantize(quantised.packed)
    quantised.to(torch.bfloat16)
    assert torch.equal(dequantize(quantised.packed), before)
    assert quantised(torch.randn(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


@EACH_KIND
def test_data_parallel_ranks_train_the_serial_adapters(add: Any) -> None:
    def rank_trains(comm: Communicator) -> dict[str, Tensor]:
        model = build(DROPPING, seed=comm.rank)
        add(model, generator=torch.Generator().manual_seed(comm.rank))
        train(DDP(model, comm, op="sum"), share(4, comm.size, comm.rank))
        return adapters_of(model)

    serial = build(DROPPING)
    add(serial)
    train(serial)
    first, second = minidist.run(rank_trains, ranks=2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert largest_difference(first, adapters_of(serial)) <= 1e-9


@pytest.mark.parametrize("ranks, sequence", [(2, False), (2, True), (4, True)])
def test_adapters_of_every_matrix_are_cut_as_the_matrices_are(ranks: int, sequence: bool) -> None:
    """Columns and rows; on four ranks two share each head of keys and values."""
    config = replace(CONFIG, heads=4, key_value_heads=2)

    def rank_trains(comm: Communicator) -> tuple[dict[str, Tensor], int]:
        model = build(config, seed=comm.rank)
        add_lora(model, rank=3, targets=EVERY_MATRIX)
        plan = {**gpt_plan(config), "head": ColumnParallel(gather=True)}
        parallelize_tensor(model, comm, plan, sequence)
        train(model)
        trained = [
            (name, parameter)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]
        whole = {
            name: placement.full(p) for name, p in trained if (placement := placement_of(p).block)
        }
        return whole, sum(parameter.numel() for _, parameter in trained)

    serial = build(config)
    add_lora(serial, rank=3, targets=EVERY_MATRIX)
    train(serial)
    count = sum(tensor.numel() for tensor in adapters_of(serial).values())
    for whole, held in minidist.run(rank_trains, ranks):
        assert whole.keys() == adapters_of(serial).keys() and held < 0.8 * count
        assert largest_difference(whole, adapters_of(serial)) <= 1e-9


def test_an_adapter_of_the_head_is_not_cut_and_a_layer_in_4_bits_neither() -> None:
    def rank_says(comm: Communicator, add: Any, target: str) -> str:
        model = build(replace(CONFIG, tied=False))
        add(model, targets=(target,))
        with pytest.raises((ValueError, TypeError)) as refused:
            parallelize_tensor(model, comm)
        return str(refused.value)

    assert "no ParallelRegion" in minidist.run(lambda comm: rank_says(comm, add_lora, "head"), 2)[0]
    assert "QuantizedLinear" in minidist.run(lambda comm: rank_says(comm, add_qlora, "query"), 2)[0]


@pytest.mark.parametrize("add", (add_lora, add_qlora))
def test_a_model_that_reads_its_layers_dtype_can_have_adapters(add: Any) -> None:
    """T5 asks the last matrix of each MLP for `weight.dtype`."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = T5Config(
        vocab_size=20,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    model, tokens = T5ForConditionalGeneration(sizes).eval(), torch.arange(6).view(1, 6)
    before = model(input_ids=tokens, labels=tokens).logits
    add(model, 2, targets=("wo", "q"))
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if name.endswith("wo.B"))
    after = model(input_ids=tokens, labels=tokens).logits
    torch.testing.assert_close(
        after, before, **({} if add is add_lora else {"rtol": 0.5, "atol": 0.5})
    )


@EACH_KIND
def test_a_model_with_adapters_can_be_pickled(add: Any) -> None:
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    add(model, rank=2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(TOKENS[:, :8]), model(TOKENS[:, :8]))
    assert list(twin.state_dict()) == list(model.state_dict())


def test_no_dequantised_matrix_waits_for_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Tensor]] = []

    def watched(*given: Any) -> Tensor:
        matrix = dequantize(*given)
        made.append(weakref.ref(matrix))
        return matrix

    monkeypatch.setattr(qlora, "dequantize", watched)
    model = GPT(CONFIG, torch.Generator().manual_seed(0))
    add_qlora(model, rank=2)
    logits = model(TOKENS[:, :8])
    forward = len(made)
    assert forward == len(EVERY_MATRIX) * CONFIG.layers
    assert not any(matrix() is not None for matrix in made)
    logits.sum().backward()
    assert len(made) > forward and not any(matrix() is not None for matrix in made)
