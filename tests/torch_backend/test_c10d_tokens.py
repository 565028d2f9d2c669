"""Tokens that travel: torch's ring attention, and a mixture of experts by torch's all-to-all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from c10d_training import BYTES, OPTIMIZERS, RANKS, STEPS, Meter, assert_same, on_ranks, whole
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor.experimental._context_parallel import _attention as context
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
)
from torch.nn.functional import one_hot, scaled_dot_product_attention

from minidist.full.comm import Communicator

B, H, T, HEAD = 2, 4, 32, 8
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Ring(torch.autograd.Function):
    """torch's ring attention with the CPU's kernel, which `context_parallel` does not know."""

    @staticmethod
    def forward(ctx: Any, *sharded: Tensor) -> Tensor:
        out, logsumexp, *_ = context._templated_ring_attention(
            dist.group.WORLD, 2, ATTENTION, *sharded, is_causal=True
        )
        ctx.save_for_backward(*sharded, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return context._templated_ring_attention_backward(
            dist.group.WORLD,
            2,
            BACKWARD,
            grad,
            "grad_out",
            *ctx.saved_tensors,
            is_causal=True,
            dropout_p=0.0,
        )


@contextmanager
def ring(method: str) -> Iterator[None]:
    """torch's options of context parallelism, which are the process's."""
    options = context._cp_options
    before = options.convert_to_f32, options.rotate_method
    options.convert_to_f32 = False
    context.set_rotate_method(method)
    try:
        yield
    finally:
        options.convert_to_f32, options.rotate_method = before


def attended(comm: Communicator) -> tuple[list[Tensor], list[int]]:
    """Return the output and the gradients of torch's ring, and the bytes forward and backward."""
    dist.init_process_group("minidist")
    mesh = dist.init_device_mesh("cpu", (comm.size,))
    shards = context._context_parallel_shard(
        mesh, queries_keys_values(), [2] * 3, _HeadTailLoadBalancer(T, comm.size, "cpu")
    )
    shards = [shard.clone().requires_grad_() for shard in shards]
    meter = Meter(comm)
    out = Ring.apply(*shards)
    meter()
    out.square().sum().backward()
    meter()
    parts = [out.detach(), *(shard.grad for shard in shards)]
    return list(context.context_parallel_unshard(mesh, parts, [2] * 4)), meter.steps


def queries_keys_values() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, T, HEAD, generator=draw, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
def test_torchs_ring_attention_is_attention(method: str) -> None:
    leaves = [each.requires_grad_() for each in queries_keys_values()]
    out = scaled_dot_product_attention(*leaves, is_causal=True)
    out.square().sum().backward()
    expected = whole([out, *(leaf.grad for leaf in leaves if leaf.grad is not None)])
    with ring(method):
        results = on_ranks(attended)
    keys_and_values = 2 * B * H * T // RANKS * HEAD * BYTES
    for found, sent in results:
        assert_same(found, expected)
        # around the ring; and backward their gradients too, which come home
        assert sent == [(RANKS - 1) * keys_and_values, (RANKS - 1 + RANKS) * keys_and_values]


WIDTH, TOKENS = 16, 64


class Experts(nn.Module):
    """Each token goes to the expert that the router likes best. [tokens, WIDTH], in and out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(WIDTH, RANKS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
            for _ in range(RANKS)
        )
        self.double()
        self.moved = 0

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.stack([expert(x) for expert in self.experts], 1)  # [tokens, experts, WIDTH]
        return (out * one_hot(chosen, RANKS)[..., None]).sum(1) * weight[:, None]


class Dispatched(Experts):
    """The same, but rank r has expert r alone, and the tokens travel."""

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        rank, world = dist.get_rank(), dist.group.WORLD
        order, leaving = chosen.argsort(stable=True), chosen.bincount(minlength=RANKS)
        coming = torch.empty_like(leaving)
        dist.all_to_all_single(coming, leaving)
        there = all_to_all_single_autograd(x[order], coming.tolist(), leaving.tolist(), world)
        done = self.experts[rank](there)
        back = all_to_all_single_autograd(done, leaving.tolist(), coming.tolist(), world)
        self.moved = int((leaving + coming).sum() - 2 * leaving[rank])
        return torch.empty_like(x).index_copy(0, order, back) * weight[:, None]


def tokens(step: int, rank: int | None = None) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    every = torch.randn(TOKENS, WIDTH, generator=draw, dtype=torch.float64)
    return every if rank is None else every.view(RANKS, -1, WIDTH)[rank]


def experts_train(comm: Communicator) -> dict[str, Any]:
    dist.init_process_group("minidist")
    found = {}
    for name, make in OPTIMIZERS.items():
        net = Dispatched()
        own = [*net.router.parameters(), *net.experts[comm.rank].parameters()]
        optimizer, extra = make(own), 0
        for step in range(STEPS):
            optimizer.zero_grad()
            meter = Meter(comm)
            x = tokens(step, comm.rank).requires_grad_()
            (net(x).square().sum() / TOKENS).backward()
            meter()
            # its own to their experts, the others' back, and so the gradients; before, how many
            extra += meter.steps[0] - 2 * net.moved * WIDTH * BYTES - (RANKS - 1) * BYTES
            for parameter in net.router.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
        found[name] = whole(own), extra, net.moved
    return found


def test_experts_behind_torchs_all_to_all_are_the_serial_mixture() -> None:
    results = on_ranks(experts_train)
    for name, make in OPTIMIZERS.items():
        net = Experts()
        optimizer = make(net.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            (net(tokens(step)).square().sum() / TOKENS).backward()
            optimizer.step()
        for rank, each in enumerate(results):
            found, extra, _ = each[name]
            assert extra == 0
            assert_same(found, whole([*net.router.parameters(), *net.experts[rank].parameters()]))
        moved = [each[name][2] for each in results]
        assert len(set(moved)) > 1, "not all send alike"
