"""The model, the text and the steps that the benches of training share, so that all of them time the same work."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.bench.measure import Run
from minidist.bench.options import HEADS
from minidist.model import GPT, GPTConfig
from minidist.parallel.replica import Replica

VOCABULARY, LAYERS = 256, 4
BATCH, TIME = 8, 128  # sequences and tokens of each a rank: computing dominates
WIDTHS = tuple(f"D={hidden}, {BATCH} x {TIME}" for hidden in (256, 512))  # the cases that have bounds


def gpt(hidden: int, time: int = TIME, layers: int = LAYERS) -> GPT:
    """Return the serial model, `hidden` channels wide, for `time` tokens."""
    return GPT(GPTConfig(vocabulary=VOCABULARY, layers=layers, hidden=hidden, heads=HEADS, sequence=time))


def text(batch: int = BATCH, time: int = TIME, seed: int = 0) -> Tensor:
    """Return tokens [B, T + 1]: inputs, and one further for the targets."""
    return torch.randint(VOCABULARY, (batch, time + 1), generator=torch.Generator().manual_seed(seed))


def training_step(replica: Replica, tokens: Tensor, divisor: int = 0) -> Run:
    """Return a step of a model whose loss is divided by `divisor`, the tokens of all ranks.

    Without a divisor it is the tokens of this rank, and gradients are to be averaged, or to stay here.
    """
    optimizer = replica.optimizer(torch.optim.AdamW, lr=1e-4)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def step() -> None:
        replica.zero_grad()
        loss = F.cross_entropy(replica.called(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        (loss / (divisor or targets.numel())).backward()  # type: ignore[no-untyped-call]
        replica.synchronize()
        optimizer.step()

    return step


def adamw_step(model: nn.Module, backward: Callable[[], object]) -> Run:
    """Return a step of what this rank has of a model: gradients away, forward and backward, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        backward()
        optimizer.step()

    return step
