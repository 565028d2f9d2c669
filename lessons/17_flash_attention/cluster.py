"""Lesson 17 at full scale: a layer of attention trained over torch's kernel, and over ours; then
bytes and times.

    torchrun --nproc-per-node 4 lessons/17_flash_attention/cluster.py              scaled_dot_product_attention
    torchrun --nproc-per-node 4 lessons/17_flash_attention/cluster.py --minidist   minidist's flash_attention

Each rank has its own sequences. On a GPU all is bfloat16, on a CPU float64: the losses of both
agree to `TOLERANCE`. After the training, rank 0 tells of each backend that this machine has what
autograd keeps, and how long forward and backward take. MATH is plain attention. Times are this
machine's, and prove nothing elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from minidist import Communicator
from minidist.course.twin import run_twin
from minidist.full.collectives import all_reduce
from minidist.full.context import flash_attention
from minidist.full.memory.account import Account

HIDDEN, HEADS, TIME, STEPS, RATE = 64, 4, 200, 4, 0.3
ON_GPU = torch.cuda.is_available()
DTYPE, TOLERANCE = (torch.bfloat16, 1e-2) if ON_GPU else (torch.float64, 1e-9)  # relative
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_torch(query: Tensor, key: Tensor, value: Tensor, backend: str = "FLASH_ATTENTION") -> Tensor:
    """Attend causally by the named kernel, or not at all."""
    with sdpa_kernel([SDPBackend.__members__[backend]]):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def by_minidist(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend causally, by the lesson's function."""
    return flash_attention(query, key, value, causal=True)[0]


def train(comm: Communicator, attend: Attention, device: torch.device) -> list[float]:
    """Let each token predict the one before, by x + out(attention(qkv(x))); return the mean loss of
    each step.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = (
        torch.randn(rows, HIDDEN, generator=generator) / HIDDEN**0.5
        for rows in (3 * HIDDEN, HIDDEN)
    )
    weights = [weight.to(device, DTYPE) for weight in drawn]
    x = torch.randn(2, TIME, HIDDEN, generator=torch.Generator().manual_seed(comm.rank + 1)).to(
        device, DTYPE
    )
    losses = []
    for _ in range(STEPS):
        qkv, out = (weight.detach().requires_grad_() for weight in weights)
        heads = (x @ qkv.T).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # [3, B, H, T, d]
        y = x + attend(*heads).transpose(1, 2).flatten(2) @ out.T
        loss = F.mse_loss(y[:, 1:], x[:, :-1])
        gradients = [gradient.double() for gradient in torch.autograd.grad(loss, (qkv, out))]
        told = [loss.detach().double().view(1), *gradients]
        for each in told:
            all_reduce(each, comm, op="mean")
        losses.append(told[0].item())
        weights = [
            weight - RATE * mean.to(DTYPE) for weight, mean in zip(weights, told[1:], strict=True)
        ]
    return losses


def production(comm: Communicator, device: torch.device) -> list[float]:
    """Train over torch's kernel."""
    return train(comm, by_torch, device)


def ours(comm: Communicator, device: torch.device) -> list[float]:
    """Train over minidist's function."""
    return train(comm, by_minidist, device)


def tell(tokens: int, name: str, device: str) -> str:
    """Return what a backend keeps from forward to backward, and the best of three times, of one
    sequence.
    """
    attend = by_minidist if name == "minidist" else partial(by_torch, backend=name)
    heads = [
        torch.randn(1, 2, tokens, 64, device=device, dtype=DTYPE, requires_grad=True)
        for _ in range(3)
    ]
    account, seconds = Account(), []
    try:
        with account.recording():
            output = attend(*heads)
    except RuntimeError as error:
        return f"not here: {str(error).splitlines()[0][:60]}"
    for _ in range(3):
        start = time.perf_counter()
        # waits for the GPU
        torch.autograd.grad(attend(*heads), heads, output.detach())[0].sum().item()
        seconds.append(time.perf_counter() - start)
    return f"keeps {account.now['activations']:13,} bytes  {1e3 * min(seconds):9.1f} ms"


if __name__ == "__main__":
    run_twin(production, ours)
    for tokens in ((4096, 16384) if ON_GPU else (512, 1024)) if dist.get_rank() == 0 else ():
        for name in (
            "MATH",
            "EFFICIENT_ATTENTION",
            "FLASH_ATTENTION",
            "CUDNN_ATTENTION",
            "minidist",
        ):
            print(f"T = {tokens:6,}  {name:20} {tell(tokens, name, 'cuda' if ON_GPU else 'cpu')}")
