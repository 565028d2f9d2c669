"""What one process shows: products in 8 bits, recomputation and page-locked batches, on the GPU as
on the CPU.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from jobs import CPU, DEVICE
from test_recompute import NESTED, TorchDropout, gradients, same_bits
from torch import Tensor, nn
from training import batches_of

from minidist.full.data.text import sequences
from minidist.full.pipeline.offload.host import HostMemory
from minidist.full.precision.fp8 import Float8Linear, scales_of, update_scales
from minidist.full.recompute.segments import recompute
from minidist.full.trainer.batches import Batches, ReadAhead


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def relative_error(ours: Tensor | None, exact: Tensor | None) -> float:
    assert ours is not None and exact is not None
    return float((ours.cpu().float() - exact).norm() / exact.norm())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(48, 64, 32), (256, 512, 128), (64, 16, 16)]
)
def test_a_gpu_computes_in_8_bits_what_the_emulation_does(
    rows: int, inputs: int, outputs: int
) -> None:
    """Forward and both products of backward, by `torch._scaled_mm` where the GPU has it; its own
    sums are float32.
    """
    layer = Float8Linear(nn.Linear(inputs, outputs, bias=False).to(DEVICE, torch.bfloat16))
    reference = Float8Linear(nn.Linear(inputs, outputs, bias=False))
    reference.load_state_dict(layer.state_dict())
    x = torch.randn(rows, inputs, generator=seeded(0)).bfloat16()
    gradient = (torch.randn(rows, outputs, generator=seeded(1)) * 1e-6).bfloat16()
    for _ in range(2):
        found = []
        for module in (layer, reference):
            module.zero_grad()
            like = module.weight
            given = x.to(like.device, like.dtype, copy=True).requires_grad_()
            out = module(given)
            out.backward(gradient.to(like.device, like.dtype))
            update_scales(module)
            found.append((out.detach(), given.grad, module.weight.grad))
        assert all(relative_error(ours, exact) < 0.01 for ours, exact in zip(*found, strict=True))
    for ours, exact in zip(scales_of(layer), scales_of(reference), strict=True):
        torch.testing.assert_close(ours.history.cpu(), exact.history, rtol=0.01, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["none", "full", NESTED], ids=str)
def test_what_is_computed_again_draws_the_same_dropout(policy: Any) -> None:
    stored, again = TorchDropout().to(DEVICE), TorchDropout().to(DEVICE)
    again.load_state_dict(stored.state_dict())
    recompute(again, policy)
    for model in (stored, again):
        torch.manual_seed(7)
        x = torch.ones(400, 6, device=DEVICE)
        model(x).square().sum().backward()
    assert same_bits(gradients(again), gradients(stored))


@pytest.mark.gpu
def test_pinned_batches_arrive_on_the_device() -> None:
    def batches() -> Batches:
        return batches_of(sequences(np.arange(1, 204), T=8), 4, ranks=3, rank=2)

    with ReadAhead(batches(), pin=not CPU) as pinned:
        for batch, plain in zip(pinned, islice(batches(), 20), strict=False):
            assert CPU or batch.inputs.is_pinned() or not len(batch.inputs)
            there = batch.to(DEVICE)
            assert there.inputs.device.type == there.targets.device.type == DEVICE.type
            assert torch.equal(there.inputs.cpu(), plain.inputs) and torch.equal(
                there.targets.cpu(), plain.targets
            )
            assert there.tokens == plain.tokens


@pytest.mark.gpu
def test_weights_that_leave_are_gone_meanwhile_and_come_back_for_backward() -> None:
    """Twice: with a copy to the host, and with the one of before. Another stage computes meanwhile."""
    stages = {number: nn.Linear(2048, 2048, device=DEVICE) for number in range(2)}
    x = torch.randn(64, 2048, generator=seeded(3)).to(DEVICE)
    stages[0](x).square().sum().backward()
    expected = gradients(stages[0])
    stages[0].zero_grad()
    size = sum(p.nbytes for p in stages[0].parameters())
    host = HostMemory(stages, [0])
    assert host.port is not None
    host.begin()
    for time in range(2):
        y = stages[0](x)
        before = 0 if CPU else torch.cuda.memory_allocated()
        host.offload(0, copy=time == 0)
        with torch.no_grad():
            other = stages[1](x)
        host.port.worker.submit(lambda: None).result()
        assert all(p.untyped_storage().nbytes() == 0 for p in stages[0].parameters())
        if not CPU:
            torch.cuda.synchronize()
            assert torch.cuda.memory_allocated() <= before + other.nbytes - size
        host.fetch(0)
        host.ready(0)
        y.square().sum().backward()
        assert same_bits(gradients(stages[0]), expected)
        stages[0].zero_grad()
    host.finish()
