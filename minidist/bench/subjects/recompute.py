"""A training step that keeps its activations, and one that recomputes each block: minidist's and torch's.

    stored        the plain model
    full          minidist.memory.recompute.segments, policy "full"
    torch full    torch.utils.checkpoint.checkpoint(use_reentrant=False) around each block

Ranks do not communicate: each takes the same steps by itself. What is compared are seconds, and the bytes of
activations at their peak, by the account. Without the last matrix product of a block, which no checkpoint repeats, the
second forward is 7/9 of the first (the three of the MLP are 2/3 of a block), and a step 1 + 7/27 = 1.26 times as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from minidist.bench.measure import Measurement, alternate
from minidist.bench.options import Options
from minidist.bench.subjects.training import COMPUTING, training_step
from minidist.memory.account.account import Account
from minidist.memory.recompute.segments import recompute
from minidist.model import GPT, GPTConfig, Where

if TYPE_CHECKING:
    from minidist.comm import Communicator

ROUNDS = 8
LAYERS = 12


def bench_recompute(options: Options, launch: str, comm: Communicator) -> Iterator[Measurement]:
    """Measure at the smallest width: seconds of a step, then MiB of activations at the peak of one."""
    hidden, (batch, time) = min(options.hidden), COMPUTING
    case = f"D={hidden}, {LAYERS} layers"
    tokens = torch.randint(256, (batch, time + 1), generator=torch.Generator().manual_seed(0))
    models = {"stored": GPT(GPTConfig(vocabulary=256, layers=LAYERS, hidden=hidden, heads=4, sequence=time))}
    models |= {name: GPT(models["stored"].config) for name in ("full", "torch full")}
    recompute(models["full"], "full")
    for layer in models["torch full"].layers:
        layer.forward = partial(_by_torch, layer.forward)
    runs = {name: training_step(model, tokens) for name, model in models.items()}
    for name, seconds in alternate(runs, comm, options.rounds or ROUNDS).items():
        yield Measurement("recompute", case, name, launch, seconds, ranks=comm.size)
    for name, run in runs.items():
        account = Account()
        account.watch(models[name])
        with account.recording():
            run()
        peak = account.peaks["activations"] / (1 << 20)
        yield Measurement("recompute", f"{case}, activations", name, launch, (peak,), "MiB", ranks=comm.size)


def _by_torch(forward: Any, x: Tensor, rotary: tuple[Tensor, Tensor], where: Where) -> Any:
    """Checkpoint a block. Tensors in a tuple would be kept all the same, but where no account sees them."""

    def block(x: Tensor, cosine: Tensor, sine: Tensor) -> Any:
        return forward(x, (cosine, sine), where)

    return checkpoint(block, x, *rotary, use_reentrant=False)
