"""A training step with tensor parallelism: minidist's, and that of torch's `parallelize_module` (DTensor) over gloo.

    serial      forward and backward, AdamW; all ranks do it at once, each by itself
    tensor      minidist.parallel.parallelize_tensor, vocabulary_parallel_cross_entropy_sum
    DTensor     torch.distributed.tensor.parallel.parallelize_module, loss_parallel

Both cut the same matrices in the same way, and reduce at the same places: one all-reduce forward and one backward for
each attention and MLP, one after the embedding, one before the head, and a few numbers a token for the loss.

    forward     embedding ─▶ Σ ─┬▶ attention ─▶ Σ ─┬▶ mlp ─▶ Σ ─▶ ... ─┬▶ head ─▶ loss
    backward                    Σ                  Σ                   Σ

Before anything is timed, all of them run one backward from the same weights, and must agree on loss and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

from torch import Tensor, nn

from minidist.bench.subject import Case, Setting, at_most, subject
from minidist.bench.subjects.training import BATCH, TIME, VOCABULARY, WIDTHS, adamw_step, forward_backward, gpt, text
from minidist.comm import Communicator
from minidist.model import GPT
from minidist.parallel.placement import tensor_placement_of
from minidist.parallel.replica import Alone
from minidist.parallel.tensor.plan import parallelize_tensor
from minidist.parallel.tensor.vocabulary import vocabulary_parallel_cross_entropy_sum

TOLERANCE = 1e-5  # of the largest element; float32 sums in another order differ by some 1e-6


@dataclass(frozen=True)
class Competitor:
    """One way to train the model.

    Attributes
    ----------
    model : GPT
        Whole, or what this rank holds of it.
    backward : callable
        Does forward and backward of the batch; returns the mean loss of its tokens.
    full : callable
        From a parameter of the model, and its gradient, to the whole gradient. Collective.
    """

    model: GPT
    backward: Callable[[], Tensor]
    full: Callable[[nn.Parameter, Any], Tensor]


@subject(peers=("serial", "DTensor"), bounds=at_most("tensor", "DTensor", dict(zip(WIDTHS, (0.78, 0.9), strict=True))))
def tensor(setting: Setting) -> Iterator[Case]:
    """Seconds of a training step at every width; every rank is given the same batch.

    The bounds: both multiply the same matrices; what differs is how a layer is called, and the wire.
    """
    for hidden in setting.options.hidden:
        found = competitors(hidden, text(), setting.comm, torch_too=setting.gloo is not None)
        check_same(found)
        runs = {name: adamw_step(Alone(competitor.model), competitor.backward) for name, competitor in found.items()}
        yield Case(f"D={hidden}, {BATCH} x {TIME}", runs)


def competitors(hidden: int, tokens: Tensor, comm: Communicator, torch_too: bool) -> dict[str, Competitor]:
    """Return everyone, starting from the same weights; each is given all of `tokens` [B, T + 1] on every rank."""
    time = tokens.shape[1] - 1
    found = {"serial": serial(gpt(hidden, time), tokens), "tensor": ours(gpt(hidden, time), tokens, comm)}
    return found | ({"DTensor": by_torch(gpt(hidden, time), tokens, comm)} if torch_too else {})


def serial(model: GPT, tokens: Tensor) -> Competitor:
    """Return the model as it is."""
    return Competitor(model, forward_backward(model, tokens), lambda _, gradient: gradient)


def ours(model: GPT, tokens: Tensor, comm: Communicator) -> Competitor:
    """Split the model by minidist."""
    parallelize_tensor(model, comm)
    loss = partial(vocabulary_parallel_cross_entropy_sum, comm=comm, vocabulary=VOCABULARY)

    def full(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        placement = tensor_placement_of(parameter)
        assert placement is not None, "parallelize_tensor records every parameter"
        return placement.full(gradient)

    return Competitor(model, forward_backward(model, tokens, loss=loss), full)


def by_torch(model: GPT, tokens: Tensor, comm: Communicator) -> Competitor:
    """Split the model by torch, as its tutorial on tensor parallelism does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    parallelize_module(model, init_device_mesh("cpu", (comm.size,)), torch_plan())
    run = forward_backward(model, tokens)  # its logits are a DTensor [B, T, V], split along V

    def backward() -> Tensor:
        with loss_parallel():
            return whole(run())

    def whole(tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # norms are no DTensors

    return Competitor(model, backward, lambda _, gradient: whole(gradient))


def torch_plan() -> dict[str, Any]:
    """Return torch's plan for our GPT.

    Attention and MLP enter once, through `PrepareModuleInput`: were query, key and value each to take a plain tensor,
    backward would reduce three times.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None)
        ),
        "layers.*.mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    plan |= {f"layers.*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    plan |= {f"layers.*.mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
    plan |= {f"layers.*.{name}": RowwiseParallel() for name in ("attention.output", "mlp.down")}
    return plan


def check_same(found: Mapping[str, Competitor]) -> None:
    """Raise RuntimeError unless every two give the same loss and gradients, to `TOLERANCE`: else times mean nothing."""
    results = {name: loss_and_gradients(competitor) for name, competitor in found.items()}
    for (one, mine), (other, theirs) in combinations(results.items(), 2):
        if mine.keys() != theirs.keys():
            raise RuntimeError(f"{one} and {other} have gradients of different parameters: no comparison of speed")
        for what, tensor in mine.items():
            difference = float((tensor - theirs[what]).abs().max() / theirs[what].abs().max())
            if not difference <= TOLERANCE:
                raise RuntimeError(
                    f"{one} and {other} differ by {difference:.1e} in {what}, more than {TOLERANCE:g}: they do not "
                    "compute the same, so their speed cannot be compared"
                )


def loss_and_gradients(competitor: Competitor) -> dict[str, Tensor]:
    """Return the loss of one backward, and the whole gradient of every parameter, by name. Collective."""
    competitor.model.zero_grad()
    found = {"loss": competitor.backward()}
    for name, parameter in competitor.model.named_parameters():
        if parameter.grad is not None:
            found[f"the gradient of {name}"] = competitor.full(parameter, parameter.grad)
    return found
