"""Without communication: each rank by itself.

`flash` is causal attention, forward and backward: the page that is read, and the kernel in C++ that
computes here.

    page     minidist.full.context.flash: page_forward, page_backward
    flash    flash_attention, which on a CPU calls torch's kernel, and adds a function of autograd
    torch    scaled_dot_product_attention

The page takes 1.3 to 2 times as long: a tile takes it about ten operations of torch, each of which
writes its result to memory, where a kernel keeps it in a cache or in registers. That is fine, as no
run waits for the page: it is to be read, and computes what no kernel does here (float64 on a GPU,
the gradient of lse on a CPU).

`adamw` is a step of AdamW over one flat shard: minidist's in one pass, and torch's two
implementations that are not naive.

`recompute` is a training step that keeps its activations, and one that recomputes each block.

    stored        the plain model
    full          minidist.full.recompute.segments, policy "full"
    torch full    torch.utils.checkpoint.checkpoint(use_reentrant=False) around each block

The bench compares the seconds of a step, and the bytes of activations at their peak, as the account
counts them. No checkpoint repeats the last matrix product of a block. The three products of the MLP
are 2/3 of a block, so the second forward is 7/9 of the first, and a step takes 1 + 7/27 = 1.26
times as long.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from minidist.bench.measure import Run
from minidist.bench.subject import Case, Counted, Setting, subject
from minidist.bench.training import gpt, text, training_step
from minidist.full.context.flash import flash_attention, page_backward, page_forward
from minidist.full.memory.account import Account
from minidist.full.model import Where
from minidist.full.precision.adamw import FusedAdamW
from minidist.full.recompute.segments import recompute as recomputed

Attention: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
ELEMENTS = 1 << 22  # of the shard: 16 MiB, far more than a cache holds
LAYERS = 12  # of the model that is recomputed


@subject(peers=("torch",), gloo=False)
def flash(setting: Setting) -> Iterator[Case]:
    """Seconds of attention and its gradients, in float32; each rank by itself. No bound: the kernel
    is torch's own.
    """
    for length in (512, 2048):
        q, k, v, gradient = (torch.randn(1, length, 4, 64).transpose(1, 2) for _ in range(4))
        runs: dict[str, Run] = {
            "page": partial(by_page, q, k, v, gradient),
            "flash": forward_backward(
                lambda q, k, v: flash_attention(q, k, v, True)[0], q, k, v, gradient
            ),
            "torch": forward_backward(
                partial(F.scaled_dot_product_attention, is_causal=True), q, k, v, gradient
            ),
        }
        yield Case(f"T={length}, d=64, 4 heads", runs)


def by_page(query: Tensor, key: Tensor, value: Tensor, gradient: Tensor) -> None:
    """Compute output and gradients by the page."""
    output, lse = page_forward(query, key, value, True)
    page_backward(
        gradient,
        query,
        key,
        value,
        (gradient * output).sum(-1),
        lse,
        True,
    )


def forward_backward(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, gradient: Tensor
) -> Run:
    """Return a function that computes the output, then the gradients of its three inputs."""
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    return lambda: torch.autograd.grad(attention(*leaves), leaves, gradient)


@subject(peers=("torch fused", "torch foreach"), rounds=15, gloo=False)
def adamw(setting: Setting) -> Iterator[Case]:
    """Seconds of one optimizer step on 4 Mi float32, against `torch.optim.AdamW`. No bound: `fused`
    is compiled.
    """

    def shard() -> list[torch.nn.Parameter]:
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, ELEMENTS))
        parameter.grad = torch.full_like(parameter, 1e-3)
        return [parameter]

    runs = {
        "one pass": FusedAdamW(shard()).step,
        "torch fused": torch.optim.AdamW(shard(), fused=True).step,
        "torch foreach": torch.optim.AdamW(shard(), foreach=True).step,
    }
    yield Case(f"{ELEMENTS >> 20} Mi elements", runs)


@subject(peers=("stored", "torch full"), gloo=False)
def recompute(setting: Setting) -> Iterator[Case | Counted]:
    """Seconds of a training step at the smallest width; then MiB of activations at the peak of
    one.
    """
    hidden = min(setting.options.hidden)
    case = f"D={hidden}, {LAYERS} layers"
    models = {name: gpt(hidden, layers=LAYERS) for name in ("stored", "full", "torch full")}
    recomputed(models["full"], "full")
    for layer in models["torch full"].layers:
        layer.forward = partial(checkpointed, layer.forward)
    runs = {name: training_step(model, text()) for name, model in models.items()}
    yield Case(case, runs)
    for name, run in runs.items():
        account = Account()
        account.watch(models[name])
        with account.recording():
            run()
        yield Counted(
            f"{case}, activations", {name: [account.peaks["activations"] / (1 << 20)]}, "MiB"
        )


def checkpointed(
    forward: Any,
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    where: Where,
) -> Any:
    """Checkpoint a block. Tensors within a tuple would be kept as well, but where no account sees
    them.
    """

    def block(x: Tensor, cosine: Tensor, sine: Tensor) -> Any:
        return forward(x, (cosine, sine), where)

    return checkpoint(block, x, *rotary, use_reentrant=False)
