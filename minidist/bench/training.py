"""The model, the text and the steps that the benches of training share, so that all of them time
the same work.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from minidist.bench.measure import Run
from minidist.bench.options import HEADS, LAYERS
from minidist.full.model import GPT, GPTConfig, cross_entropy_sum
from minidist.full.replica import Alone, Replica

Forward: TypeAlias = Callable[..., Tensor]
# does forward and backward of a batch; returns the mean loss of its tokens
Backward: TypeAlias = Callable[[], Tensor]
VOCABULARY = 256
BATCH, TIME = 8, 128  # sequences and tokens of each a rank: computing dominates


def gpt(hidden: int, time: int = TIME, layers: int = LAYERS, **sizes: int) -> GPT:
    """Return the serial model, `hidden` channels wide, for `time` tokens; `sizes` are those of
    `GPTConfig`.
    """
    return GPT(GPTConfig(VOCABULARY, layers, hidden, HEADS, sequence=time, **sizes))  # type: ignore[arg-type]


def text(
    batch: int = BATCH, time: int = TIME, seed: int = 0, vocabulary: int = VOCABULARY
) -> Tensor:
    """Return tokens [B, T + 1]: inputs, and one further for the targets."""
    return torch.randint(
        vocabulary, (batch, time + 1), generator=torch.Generator().manual_seed(seed)
    )


def training_step(model: nn.Module, tokens: Tensor, **options: Any) -> Run:
    """Return a step of a model, wrapped in its strategy.

    Those of minidist sum gradients, so a loss is divided by the tokens of all ranks. Otherwise it
    is by the tokens of this rank, and gradients are averaged, or stay here.
    """
    ranks = cast(Any, model).comm.size if isinstance(model, Replica) else 1
    return adamw_step(
        model, forward_backward(model, tokens, tokens[:, 1:].numel() * ranks), **options
    )


def forward_backward(
    model: Forward, tokens: Tensor, divisor: int = 0, loss: Forward = cross_entropy_sum
) -> Backward:
    """Return what takes `tokens` [B, T + 1] forward and back; it returns the loss, divided by
    `divisor`, or by all.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def run() -> Tensor:
        mean = loss(model(inputs), targets) / (divisor or targets.numel())
        mean.backward()  # type: ignore[no-untyped-call]
        return mean.detach()

    return run


def adamw_step(model: nn.Module, backward: Callable[[], object], **options: Any) -> Run:
    """Return a step: forward and backward, gradients reduced over the replicas, AdamW with
    `options`, gradients away.

    It returns what `backward` returns, and leaves no gradients in memory.
    """
    replica = model if isinstance(model, Replica) else Alone(model)
    optimizer = replica.optimizer(torch.optim.AdamW, lr=1e-4, **options)
    replica.zero_grad()

    def step() -> object:
        loss = backward()
        replica.synchronize()
        optimizer.step()
        replica.zero_grad()
        return loss

    return step


def expect_same(losses: Mapping[str, Any], tolerance: float) -> None:
    """Raise RuntimeError if losses that competitors start with differ by more than this part of
    them.

    They then train different models, and to compare their speed would mean nothing.
    """
    found = {name: float(loss) for name, loss in losses.items()}
    # also if one is no number
    if not all(loss <= (1 + tolerance) * min(found.values()) for loss in found.values()):
        raise RuntimeError(
            f"these do not train the same model, as their first losses differ: {found}"
        )
