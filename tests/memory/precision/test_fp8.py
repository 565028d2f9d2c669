"""Float8: rounding element by element, products, delayed scales that all ranks agree on, and a GPT
that trains.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import minidist
from minidist.full import DDP
from minidist.full.comm import Cluster, Communicator
from minidist.full.model import GPT, GPTConfig, cross_entropy_sum
from minidist.full.precision.fp8 import (
    E4M3,
    E5M2,
    Float8Linear,
    Float8Multiply,
    dequantize,
    multiply_on_tensor_cores,
    quantize,
    scale_for,
    scaled_matmul,
    scales_of,
    to_fp8,
    update_scales,
)

CONFIG = GPTConfig(
    vocabulary=32, layers=2, hidden=32, heads=4, intermediate=48, sequence=16, tied=True
)
both_formats = pytest.mark.parametrize("dtype", (E4M3, E5M2))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def steps_between_neighbours(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance of the format's numbers around each element: by exponent, and constant among the
    subnormals.
    """
    mantissa, lowest = (3, -6) if dtype == E4M3 else (2, -14)
    exponent = torch.frexp(x.double().abs()).exponent - 1
    return torch.ldexp(
        torch.ones_like(x, dtype=torch.float64), exponent.clamp(min=lowest) - mantissa
    )


def histories(model: nn.Module) -> Tensor:
    return torch.stack([scale.history for scale in scales_of(model)])


def relative_error(ours: Tensor, exact: Tensor) -> float:
    return float((ours - exact).norm() / exact.norm())


# ---- casting ----


@both_formats
def test_every_element_is_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    magnitudes = torch.exp2(
        torch.empty(50_000).uniform_(-24, math.log2(largest), generator=seeded())
    )
    x = torch.cat((magnitudes, -magnitudes, torch.zeros(1)))
    for scale in (1.0, 2.0**20, 2.0**-9):
        error = (
            dequantize(quantize(x / scale, dtype, scale), scale).double() * scale - x.double()
        ).abs()
        assert (error <= steps_between_neighbours(x, dtype) / 2).all()
        normal = x.abs() >= torch.finfo(dtype).smallest_normal
        relative = float((error[normal] / x[normal].abs()).max())
        # half a step above a power of two
        assert 0.99 < relative * (17 if dtype == E4M3 else 9) < 1 + 1e-6


@both_formats
def test_numbers_of_the_format_stay_and_those_beyond_saturate(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = codes[codes.float().isfinite()]
    assert torch.equal(quantize(finite.float(), dtype).view(torch.uint8), finite.view(torch.uint8))
    largest = torch.finfo(dtype).max
    beyond = torch.tensor([largest * 1.5, -1e30, math.inf, -math.inf])
    assert torch.equal(
        dequantize(quantize(beyond, dtype)), largest * torch.tensor([1.0, -1, 1, -1])
    )
    assert dequantize(quantize(torch.tensor([math.nan]), dtype)).isnan().all()


@both_formats
def test_a_scale_is_the_largest_power_of_two_that_fits(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for amax in (
        *torch.logspace(-30, 30, 200).tolist(),
        largest,
        largest / 2,
        largest * 1.001,
        1.0,
    ):
        scale = float(scale_for(torch.tensor(amax), dtype))
        assert math.frexp(scale)[0] == 0.5
        assert amax * scale <= largest * (1 + 1e-6) and amax * scale * 2 > largest * (1 - 1e-6)
    for tiny in (0.0, 1e-45):
        assert float(scale_for(torch.tensor(tiny), dtype)) == 2.0**126


# ---- products ----


def operands(m: int, k: int, n: int, dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[Tensor, ...]:
    a, b = (
        torch.randn(m, k, generator=seeded(1)) * 1e-3,
        torch.randn(k, n, generator=seeded(2)) * 50,
    )
    scales = [scale_for(x.abs().max(), dtype) for x, dtype in zip((a, b), dtypes, strict=True)]
    return quantize(a, dtypes[0], scales[0]), quantize(b, dtypes[1], scales[1]), *scales, a @ b


@pytest.mark.parametrize("first", (E4M3, E5M2))
def test_the_emulation_computes_what_torchs_scaled_product_does(
    first: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch has a slow version of the hardware's product for CPUs, which is not as particular about
    layouts.
    """
    slow_version = torch._scaled_mm

    def particular(rows: Tensor, columns: Tensor, *args: Tensor, **options: torch.dtype) -> Tensor:
        assert rows.is_contiguous() and columns.t().is_contiguous()
        return slow_version(rows, columns, *args, **options)

    monkeypatch.setattr(torch, "_scaled_mm", particular)
    a, b, a_scale, b_scale, exact = operands(32, 48, 64, (first, E4M3))
    emulated = scaled_matmul(a, b, a_scale, b_scale, torch.float32)
    assert (
        relative_error(multiply_on_tensor_cores(a, b, a_scale, b_scale, torch.float32), emulated)
        < 1e-6
    )
    turned = multiply_on_tensor_cores(b.t(), a.t(), b_scale, a_scale, torch.float32)
    assert relative_error(turned, emulated.t()) < 1e-6
    assert 0.01 < relative_error(emulated, exact) < (0.05 if first == E4M3 else 0.08)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    scale = scale_for(x.abs().max(), dtype)
    return dequantize(quantize(x, dtype, scale), scale)


def test_a_layer_multiplies_what_float8_has_left_of_its_operands() -> None:
    plain = nn.Linear(24, 10)
    layer = Float8Linear(plain)
    assert (
        layer.weight is plain.weight
        and layer.bias is plain.bias
        and layer.state_dict().keys() == {"weight", "bias"}
    )
    x = torch.randn(2, 3, 24, generator=seeded(), requires_grad=True)
    gradient = torch.randn(2, 3, 10, generator=seeded(1)) * 1e-7
    y = layer(x)
    y.backward(gradient)
    x8, w8, g8 = (
        rounded(x.detach(), E4M3),
        rounded(plain.weight.detach(), E4M3),
        rounded(gradient, E5M2),
    )
    torch.testing.assert_close(y.detach(), x8 @ w8.t() + plain.bias.detach())
    assert x.grad is not None and plain.weight.grad is not None and plain.bias.grad is not None
    torch.testing.assert_close(x.grad, g8 @ w8, rtol=1e-5, atol=1e-13)
    torch.testing.assert_close(
        plain.weight.grad, g8.flatten(0, 1).t() @ x8.flatten(0, 1), rtol=1e-5, atol=1e-13
    )
    torch.testing.assert_close(plain.bias.grad, gradient.sum((0, 1)))


@pytest.mark.parametrize("shape", ((24,), (5, 24), (0, 24), (0, 3, 24)))
def test_a_layer_takes_every_shape_that_a_linear_layer_takes(shape: tuple[int, ...]) -> None:
    layer = Float8Linear(nn.Linear(24, 10, bias=False).bfloat16())
    x = torch.ones(shape, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 10) and y.dtype == torch.bfloat16
    assert x.grad is not None and x.grad.shape == shape and x.grad.dtype == torch.bfloat16
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.bfloat16


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    layer = Float8Linear(nn.Linear(16, 16))
    layer.weight.requires_grad_(False)
    x = torch.ones(4, 16, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None and x.grad is not None
    layer.weight.requires_grad_(True)
    layer(x.detach()).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("bad", (math.inf, math.nan))
def test_an_overflow_is_not_saturated_away(bad: float) -> None:
    """It must reach the loss scaler, and the scales must forget it."""
    layer = Float8Linear(nn.Linear(16, 16))
    x = torch.ones(4, 16, requires_grad=True)
    layer(x).backward(torch.full((4, 16), 1e-6))
    update_scales(layer)
    gradient = torch.full((4, 16), 1e-6)
    gradient[2, 3] = bad
    layer(x).backward(gradient)
    assert layer.weight.grad is not None and not layer.weight.grad.isfinite().any()
    update_scales(layer)
    assert histories(layer)[2, :2].tolist() == pytest.approx([0, 1e-6])


# ---- delayed scales ----


def test_small_gradients_vanish_in_float8_without_scales_and_do_not_with_them() -> None:
    gradient = torch.randn(64, 16, generator=seeded()) * 1e-6  # E5M2's smallest number is 1.5e-5
    assert not dequantize(quantize(gradient, E5M2)).any()
    assert relative_error(rounded(gradient, E5M2), gradient) < 0.08


def test_a_scale_goes_by_the_largest_of_its_history_and_what_outgrows_it_saturates() -> None:
    layer = Float8Linear(nn.Linear(16, 16, bias=False), history=2)
    scale, ones = layer.in_fp8.scales[0], torch.ones(16, 16)

    def cast_of(size: float) -> float:
        """Return what an input of equal elements looks like in this step."""
        layer(ones * size / 2)  # a smaller microbatch before it
        values, factor = scale.cast(ones * size, learn=True)
        layer(ones * size / 4)
        update_scales(layer)
        return float(dequantize(values, factor)[0, 0])

    assert cast_of(8.0) == 8.0  # its own amax: there is no past
    assert scale.history.tolist() == [8, 0]
    assert cast_of(100.0) == 448 / 32  # saturated: 32 brought 8 to 256
    assert cast_of(100.0) == pytest.approx(100, rel=2**-4)
    assert cast_of(1.0) == 1
    assert cast_of(100.0) == pytest.approx(100, rel=2**-4)  # the 1 before it has not made it forget
    assert cast_of(1.0) == 1 and cast_of(1.0) == 1
    assert scale.history.tolist() == [1, 1]  # 100 is forgotten


def test_evaluation_teaches_the_scales_nothing() -> None:
    layer = Float8Linear(nn.Linear(16, 16)).eval()
    layer(torch.ones(3, 16)).sum().backward()
    assert not any(float(scale.amax) for scale in layer.in_fp8.scales)


def gpt(seed: int = 0, device: str = "cpu") -> GPT:
    return GPT(CONFIG, seeded(seed), device=device)


def loss_of(model: nn.Module, step: int, rows: slice = slice(None)) -> Tensor:
    """The rank's part of the loss per token, on a text in which a token tells the next."""
    first = torch.randint(32, (8, 1), generator=seeded(100 + step))
    batch = (first * 3 ** torch.arange(13))[rows] % 32
    return cross_entropy_sum(model(batch[:, :-1]), batch[:, 1:]) / 96


def test_the_layers_of_a_gpt_are_replaced_and_its_parameters_are_not() -> None:
    model = gpt()
    before = dict(model.named_parameters())
    names = to_fp8(model)
    assert len(names) == 14 and not any("head" in name for name in names)
    assert type(model.head) is nn.Linear and type(model.layers[1].mlp.up) is Float8Linear
    after = dict(model.named_parameters())
    assert list(before) == list(after) and all(before[name] is after[name] for name in before)
    assert not list(model.buffers()) and model.state_dict().keys() == gpt().state_dict().keys()
    other = gpt()
    assert len(to_fp8(other, skip=("layers.0", "down"))) == 7  # six in layer 1, and the head
    assert other.head.weight is other.embedding.weight
    shared = nn.Linear(4, 4)
    twice = nn.Sequential(shared, shared)
    assert to_fp8(twice) == ["0", "1"] and twice[0] is twice[1]


def test_a_model_without_anything_to_replace_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to do in float8"):
        to_fp8(nn.Sequential(nn.Tanh()))
    with pytest.raises(ValueError, match="history=0"):
        to_fp8(gpt(), history=0)


@pytest.mark.parametrize("ranks", (2, 3))
def test_amaxes_are_the_largest_of_all_ranks_for_one_message_a_step(ranks: int) -> None:
    def program(comm: Communicator) -> tuple[Tensor, Tensor, int]:
        model = gpt()
        to_fp8(model)
        rows = slice(8 * comm.rank // ranks, 8 * (comm.rank + 1) // ranks)
        (loss_of(model, 0, rows) * (comm.rank + 1)).backward()
        own = torch.stack([scale.amax for scale in scales_of(model)])
        sent = comm.traffic.messages
        update_scales(model, comm)
        return own, histories(model)[:, 0], comm.traffic.messages - sent

    results = minidist.run(program, ranks)
    largest = torch.stack([own for own, _, _ in results]).amax(0)
    assert len(largest) == 42 and (largest > 0).all()
    assert any(not torch.equal(own, largest) for own, _, _ in results)
    for _, seen, messages in results:
        assert torch.equal(seen, largest)
        assert messages <= 2 * (ranks - 1)  # those of one all-reduce, not of 42


def test_two_axes_see_the_largest_of_both() -> None:
    def program(comm: Communicator) -> float:
        row, column = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
        layer = Float8Linear(nn.Linear(16, 16))
        layer(torch.full((2, 16), float(comm.rank + 1)))
        update_scales(layer, row, column)
        return float(layer.in_fp8.scales[0].history[0])

    assert minidist.run(program, 4) == [4.0] * 4


def test_scales_are_synchronised_without_values_too() -> None:
    def program(comm: Communicator) -> tuple[int, float]:
        model = gpt(device="meta")
        to_fp8(model)
        model(torch.zeros(2, 8, dtype=torch.int64, device="meta")).sum().backward()
        started = comm.clock()
        update_scales(model, comm)
        return len(histories(model)), comm.clock() - started

    for rows, seconds in minidist.run(program, 4, cluster=Cluster.h100(nodes=1)):
        assert rows == 42 and 0 < seconds < 1e-3


# ---- training ----


def train(
    model: nn.Module,
    steps: range,
    comm: Communicator | None = None,
    scales: nn.Module | None = None,
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows = (
        slice(None)
        if comm is None
        else slice(8 * comm.rank // comm.size, 8 * (comm.rank + 1) // comm.size)
    )
    losses = []
    for step in steps:
        model.zero_grad()
        loss = loss_of(model, step, rows)
        loss.backward()
        optimizer.step()
        update_scales(scales or model, *([] if comm is None else [comm]))
        losses.append(loss.item())
    return losses


def test_a_gpt_trains_in_float8_as_it_does_in_float32() -> None:
    plain, model = gpt(), gpt()
    to_fp8(model)
    exact, ours = train(plain, range(30)), train(model, range(30))
    assert exact[-1] < exact[0] * 0.6
    assert ours != exact
    for a, b in zip(ours, exact, strict=True):
        assert a == pytest.approx(b, rel=0.01)


def test_data_parallel_ranks_stay_equal_in_float8_and_near_one_rank() -> None:
    def program(comm: Communicator) -> tuple[list[Tensor], list[float], Tensor]:
        model = gpt(seed=comm.rank)
        to_fp8(model)
        losses = train(DDP(model, comm, op="sum"), range(10), comm, scales=model)
        return [weight.detach() for weight in model.parameters()], losses, histories(model)

    model = gpt()
    to_fp8(model)
    serial = train(model, range(10))
    results = minidist.run(program, 2)
    for weights, _, seen in results:
        assert all(torch.equal(a, b) for a, b in zip(weights, results[0][0], strict=True))
        assert torch.equal(seen, results[0][2])
    assert sum(losses[-1] for _, losses, _ in results) == pytest.approx(serial[-1], rel=0.02)


def test_a_run_continues_bit_for_bit_with_its_histories() -> None:
    model, other = gpt(), gpt(seed=1)
    to_fp8(model)
    to_fp8(other)
    train(model, range(3))
    other.load_state_dict(model.state_dict())
    for seen, scale in zip(histories(model), scales_of(other), strict=True):
        scale.history.copy_(seen)
    assert train(model, range(3, 6)) == train(other, range(3, 6))


@pytest.mark.parametrize(
    "copied",
    (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))),
    ids=("deep", "pickle"),
)
def test_a_copy_keeps_the_histories_that_a_checkpoint_saves(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    to_fp8(model)
    twin = copied(model)
    for each in (model, twin):
        each(torch.ones(2, 16)).sum().backward()
        update_scales(each)
    for ours, theirs in zip(model.modules(), twin.modules(), strict=True):
        if isinstance(ours, Float8Multiply) and isinstance(theirs, Float8Multiply):
            assert ours.histories.count_nonzero() == 3
            assert torch.equal(ours.histories, theirs.histories)
