"""A training step on long sequences: on one rank, and its tokens shared out, by minidist and by
torch.

    serial         each rank by itself trains on whole sequences
    ring, zigzag   minidist.full.context, in contiguous and in zigzag order, with DDP
    torch ring, torch zigzag
                   torch.distributed.tensor.experimental's ring attention over gloo, without and
                   with its load balancer ("head-tail"), which is the zigzag order, with
                   DistributedDataParallel

All of them compute a block by the same C++ kernel of torch. Before anything is timed, their first
losses must agree.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from minidist.bench.measure import Run
from minidist.bench.options import SHORTEST
from minidist.bench.subject import Case, Setting, subject
from minidist.bench.training import adamw_step, expect_same, gpt, text, training_step
from minidist.full import DDP
from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator
from minidist.full.context import parallelize_context, shard_tokens
from minidist.full.context.context_parallel import attending
from minidist.full.context.order import positions
from minidist.full.context.ring import Ring
from minidist.full.model import Where, cross_entropy_sum
from minidist.full.model.attention import causal_attention
from minidist.full.model.gpt import Attend

# tokens of a sequence, 4 and 16 times those of the other benches; 2048 tokens a step
TIMES = (SHORTEST, 2048)
ORDERS = {"ring": "contiguous", "zigzag": "zigzag"}


@subject(peers=("serial", "torch ring", "torch zigzag"))
def context(setting: Setting) -> Iterator[Case]:
    """Seconds of a training step at every width and length."""
    comm = setting.comm
    for hidden in setting.options.hidden:
        for time in TIMES:
            tokens = text(2048 // time, time)
            runs = {"serial": training_step(gpt(hidden, time), tokens)}
            for name, order in ORDERS.items():
                model = gpt(hidden, time)
                parallelize_context(model, comm, "ring", order)
                runs[name] = shared_step(DDP(model, comm, op="sum"), tokens, comm, order)
                if setting.gloo is not None:
                    model = gpt(hidden, time)
                    for module in attending(model).values():
                        module.attend = torchs_ring(order == "zigzag")
                    theirs = nn.parallel.DistributedDataParallel(model)
                    runs[f"torch {name}"] = shared_step(theirs, tokens, comm, order, comm.size)
            expect_same({name: run() for name, run in runs.items()}, 1e-5)
            yield Case(f"D={hidden}, {2048 // time} x {time}", runs)
    yield Case(
        "attention alone, 1 x 4096, 8 heads of 64, 2 of keys",
        attention_alone(comm, setting.gloo is not None),
    )


def attention_alone(comm: Communicator, torch_too: bool) -> dict[str, Run]:
    """Return forward and backward of attention alone, without a model around it."""
    whole = [
        torch.randn(1, heads, 4096, 64, generator=torch.Generator().manual_seed(0))
        for heads in (8, 2, 2)
    ]

    def run(attend: Attend, parts: list[Tensor]) -> Run:
        return lambda: torch.autograd.grad(attend(*parts).sum(), parts)

    runs: dict[str, Run] = {
        "serial": run(causal_attention, [part.requires_grad_() for part in whole])
    }
    for name, order in ORDERS.items():
        parts = [
            part.detach()[:, :, positions(order, comm.size, comm.rank, 4096)].requires_grad_()
            for part in whole
        ]
        runs[name] = run(Ring(comm, order, causal_attention, comm.stream()), parts)
        if torch_too:
            runs[f"torch {name}"] = run(torchs_ring(order == "zigzag"), parts)
    return runs


def shared_step(
    model: nn.Module, tokens: Tensor, comm: Communicator, order: str, times: int = 1
) -> Run:
    """Return a step on this rank's part of `tokens` [B, T + 1]; `times` makes up for gradients that
    are averaged.
    """
    inputs, where = shard_tokens(tokens[:, :-1], comm, order)
    targets, _ = shard_tokens(tokens[:, 1:], comm, order)

    def backward() -> Tensor:
        loss = cross_entropy_sum(model(inputs, Where(positions=where)), targets) / (
            targets.numel() * comm.size
        )
        (loss * times).backward()  # type: ignore[no-untyped-call]
        all_reduce(total := loss.detach(), comm)
        return total

    return adamw_step(model, backward)


def torchs_ring(balanced: bool) -> Attend:
    """Return what attends by torch's ring, with torch's kernel for CPUs."""
    return lambda query, key, value: TorchRing.apply(query, key, value, balanced)  # type: ignore[no-untyped-call]


class TorchRing(torch.autograd.Function):
    """Torch's ring attention without its DTensor: that has no rule for the kernel of CPUs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, balanced: bool) -> Tensor:
        ctx.balanced, kernel = balanced, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        ring, group = torchs(balanced)._templated_ring_attention, torch.distributed.group.WORLD
        output, lse = ring(group, 2, kernel, query, key, value, is_causal=True)
        ctx.save_for_backward(query, key, value, output, lse)
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        ring, group = (
            torchs(ctx.balanced)._templated_ring_attention_backward,
            torch.distributed.group.WORLD,
        )
        saved = ctx.saved_tensors
        return (
            *ring(group, 2, kernel, gradient, "grad_out", *saved, is_causal=True, dropout_p=0.0),
            None,
        )


def torchs(balanced: bool) -> Any:
    """Return torch's module of ring attention, with its load balancer or without."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    _attention._cp_options.enable_load_balance = balanced
    return _attention
