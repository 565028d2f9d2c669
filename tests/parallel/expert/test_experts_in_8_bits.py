"""Experts whose products have 8 bits: each with scales of its own, the same on any layout; what backward
keeps of them, and that they train as the serial model does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from layouts import SMALL, Case, distances
from torch import Tensor

import minidist
from minidist.full.comm import Communicator
from minidist.full.expert.dispatch import Dispatch
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import GPT
from minidist.full.model.moe.experts import Experts
from minidist.full.precision.fp8 import (
    E4M3,
    E5M2,
    Float8Multiply,
    dequantize,
    quantize,
    scale_for,
    scales_of,
    update_scales,
)
from minidist.full.precision.fp8_experts import experts_to_fp8
from minidist.further import Recipe

COUNTS = [5, 1, 0, 6]
# Every token goes to all experts: rounding to 8 bits sends none of them elsewhere.
ALL = replace(SMALL, experts=4, top_k=4, shared_experts=1, tied=False)
FROZEN = ("layers.1.attention.key.weight", "layers.0.mlp.routed.experts.up")


def experts(dtype: torch.dtype = torch.float32) -> Experts:
    """Return four small experts, of which each is ten times as large as the one before."""
    found = Experts(4, 16, 32).to(dtype)
    generator = torch.Generator().manual_seed(3)
    for parameter in found.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            parameter.copy_(drawn * 10.0 ** torch.arange(-2, 2).view(-1, 1, 1))
    return found


def rows_of(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(sum(COUNTS), 16, generator=generator).to(dtype)


def passed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a format has left of a tensor, under the scale of the tensor itself."""
    scale = scale_for(x.abs().max().float(), dtype)
    return dequantize(quantize(x, dtype, scale), scale)


def test_each_expert_multiplies_what_its_own_scales_leave() -> None:
    layer, rows = experts(), rows_of(0)
    assert experts_to_fp8(layer) == [""]
    product = layer.products["down"]
    inside = torch.randn(sum(COUNTS), 32, generator=torch.Generator().manual_seed(1))
    inside.requires_grad_()
    found = product(inside, layer.down, COUNTS)
    (rows * found).sum().backward()  # type: ignore[no-untyped-call]
    assert layer.down.grad is not None and inside.grad is not None
    parts = zip(*(torch.split(each.detach(), COUNTS) for each in (inside, rows)), strict=True)
    outputs, of_inputs = torch.split(found, COUNTS), torch.split(inside.grad, COUNTS)
    for expert, (x, gradient) in enumerate(parts):
        if not len(x):
            assert not layer.down.grad[expert].any()
            continue
        x8, w8 = passed(x, E4M3), passed(layer.down[expert].detach(), E4M3)
        g8 = passed(gradient, E5M2)
        torch.testing.assert_close(outputs[expert], x8 @ w8.T)
        torch.testing.assert_close(of_inputs[expert], g8 @ w8)
        torch.testing.assert_close(layer.down.grad[expert], g8.T @ x8)


def train(layer: Callable[[Tensor], Tensor], own: Experts, update: Callable[[], None]) -> Tensor:
    """Take three steps; return the last rows' outputs."""
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-4)
    for step in range(3):
        optimizer.zero_grad()
        found = layer(rows_of(step))
        found.square().sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        update()
    return found.detach()


@pytest.mark.parametrize("layout", [Layout(dp=2, ep=2), Layout(dp=2, tp=2, ep=2), Layout(tp=2)])
def test_whoever_has_an_expert_its_scales_are_those_of_the_serial_layer(layout: Layout) -> None:
    serial = experts()
    experts_to_fp8(serial)
    outputs = train(lambda rows: serial(rows, COUNTS), serial, lambda: update_scales(serial))
    histories = [scale.history for scale in scales_of(serial)]

    def program(comm: Communicator) -> tuple[Tensor, list[Tensor]]:
        mesh = Mesh(comm, layout)
        among = mesh.over("ep", "tp")
        mine = range(4)[among.rank * 4 // among.size : (among.rank + 1) * 4 // among.size]
        own = Experts(len(mine), 16, 32)
        for parameter, whole in zip(own.parameters(), experts().parameters(), strict=True):
            parameter.data = whole.data[mine.start : mine.stop].clone()
        own.count, own.numbers = 4, mine
        experts_to_fp8(own)
        dispatch = Dispatch(own, among)

        def layer(rows: Tensor) -> Tensor:
            """Each rank sends the rows of some experts; together these are all rows, once."""
            kept, counts = [], [0] * 4
            for expert, part in enumerate(torch.split(rows, COUNTS)):
                share = part[among.rank :: among.size]
                kept.append(share)
                counts[expert] = len(share)
            sent = torch.cat(kept).requires_grad_()
            return dispatch(sent, counts)

        found = train(layer, own, lambda: update_scales(own, mesh.data, mesh.tp))
        return found, [scale.history for scale in scales_of(own)]

    together = minidist.run(program, layout.size)
    for rank, (found, learned) in enumerate(together):
        ranks = layout.size
        same = [part[rank::ranks] for part in torch.split(outputs, COUNTS)]
        torch.testing.assert_close(found, torch.cat(same), rtol=1e-4, atol=1e-4)
        for ours, theirs in zip(learned, histories, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0.0)


CASES = {
    "ep 2": (Layout(dp=2, ep=2), Recipe(fp8=True)),
    "ep 2 of 4, ZeRO 1": (Layout(dp=4, ep=2), Recipe(fp8=True, zero=1)),
    "ep 2, ZeRO 3": (Layout(dp=2, ep=2), Recipe(fp8=True, zero=3)),
    "tp 2, ep 2": (Layout(dp=2, tp=2, ep=2), Recipe(fp8=True, sp=True)),
    "pp 2, ep 2, recomputed": (
        Layout(dp=2, pp=2, ep=2),
        Recipe(fp8=True, microbatches=2, recompute="full"),
    ),
}
RARE = {
    "ep 2, compiled": (Layout(dp=2, ep=2), Recipe(fp8=True, compile="aot_eager")),
    "cp 2, ep 2": (Layout(dp=2, cp=2, ep=2), Recipe(fp8=True)),
    "shards in pairs": (Layout(dp=4), Recipe(fp8=True, zero=3, hsdp=2)),
    "ep 2, exchanges in 8 bits": (Layout(dp=2, ep=2), Recipe(fp8=True, ep_fp8=True)),
    "pp 2, interleaved": (
        Layout(pp=2, dp=2, ep=2),
        Recipe(fp8=True, schedule="interleaved", chunks=2, microbatches=4),
    ),
}


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.soak) for name in RARE)]
)
def test_gradients_are_as_near_as_those_of_the_serial_model(name: str) -> None:
    layout, recipe = (CASES | RARE)[name]
    case = Case(layout, recipe, ALL, dtype=torch.float32, frozen=FROZEN)
    ours, serial = distances(case)
    assert 1e-3 < serial < 0.2 and ours < 2 * serial


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_backward_keeps_to_the_byte(dtype: torch.dtype) -> None:
    """Rows and matrices in 8 bits, with a scale for each expert; gate and up as they are."""
    layer, kept = experts(dtype), 0
    experts_to_fp8(layer)
    seen: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            kept += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(rows_of(0, dtype), COUNTS)
    rows, weights = sum(COUNTS), 4 * 16 * 32
    read = rows * (2 * 16 + 32)
    scales = 3 * 2 * 4 * 4
    between = 2 * rows * 32 * dtype.itemsize
    assert kept == read + 3 * weights + scales + between


def test_a_model_has_them_in_each_layer_and_its_routers_stay() -> None:
    model = GPT(ALL)
    assert experts_to_fp8(model) == [
        f"layers.{layer}.mlp.routed.experts" for layer in range(ALL.layers)
    ]
    products = [each for each in model.modules() if isinstance(each, Float8Multiply)]
    assert len(products) == 3 * ALL.layers
    assert {tuple(each.histories.shape) for each in products} == {(3, 4, 16)}
    with pytest.raises(ValueError, match="history=0: scales go by the amaxes of at least 1 step"):
        experts_to_fp8(model, history=0)
