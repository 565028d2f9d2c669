"""A training step that keeps its activations, and one that recomputes each block: minidist's and torch's.

    stored        the plain model
    full          minidist.memory.recompute.segments, policy "full"
    torch full    torch.utils.checkpoint.checkpoint(use_reentrant=False) around each block

Ranks do not communicate: each takes the same steps by itself. Compared are the seconds of a step, and the bytes of
activations at their peak, as the account counts them. No checkpoint repeats the last matrix product of a block. The
three products of the MLP are 2/3 of a block, so the second forward is 7/9 of the first, and a step takes 1 + 7/27 =
1.26 times as long.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from minidist.bench.subject import Case, Counted, Setting, subject
from minidist.bench.training import gpt, text, training_step
from minidist.memory.account import Account
from minidist.memory.recompute.segments import recompute as recomputed
from minidist.model import Where
from minidist.parallel.replica import Alone

LAYERS = 12


@subject(peers=("stored", "torch full"), gloo=False)
def recompute(setting: Setting) -> Iterator[Case | Counted]:
    """Seconds of a training step at the smallest width; then MiB of activations at the peak of one."""
    hidden = min(setting.options.hidden)
    case = f"D={hidden}, {LAYERS} layers"
    models = {name: gpt(hidden, layers=LAYERS) for name in ("stored", "full", "torch full")}
    recomputed(models["full"], "full")
    for layer in models["torch full"].layers:
        layer.forward = partial(_by_torch, layer.forward)
    runs = {name: training_step(Alone(model), text()) for name, model in models.items()}
    yield Case(case, runs)
    for name, run in runs.items():
        account = Account()
        account.watch(models[name])
        with account.recording():
            run()
        yield Counted(f"{case}, activations", {name: [account.peaks["activations"] / (1 << 20)]}, "MiB")


def _by_torch(forward: Any, x: Tensor, rotary: tuple[Tensor, Tensor], where: Where) -> Any:
    """Checkpoint a block. Tensors within a tuple would be kept as well, but where no account sees them."""

    def block(x: Tensor, cosine: Tensor, sine: Tensor) -> Any:
        return forward(x, (cosine, sine), where)

    return checkpoint(block, x, *rotary, use_reentrant=False)
