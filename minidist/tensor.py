"""Tensor parallelism: every rank holds and computes a part of each attention and each MLP.

                 x [B, T, D], the same on every rank
                 │ f   forward: nothing          backward: all-reduce
      ┌──────────┴───────────┐
      │ column-parallel      │  Y_r = X A_r     [B, T, C/P]   A's outputs are cut: gate, up, query, key, value
      │ what treats channels │  silu, attention by heads: no message
      │ row-parallel         │  Z_r = Y_r B_r   [B, T, D]     B's inputs are cut: down, output
      └──────────┬───────────┘
                 │ g   forward: all-reduce       backward: nothing
                 z = Σ Z_r [B, T, D], the same on every rank

Between the two cuts nothing has to be sent: that is why they come in this order. `x` enters once,
for all matrices that read it: if each matrix let it enter by itself, backward would all-reduce two
or three times. Cost: f and g send 2 (P - 1)/P of B T D numbers each, once in a step.

With *sequence parallelism* a rank has only T/P tokens outside of f and g, where norms and sums work
token by token. f gathers the tokens, and g scatters them: an all-gather and a reduce-scatter, which
send as much together as one all-reduce, and 1/P of these activations is held.

Embedding and head are cut along the vocabulary. The loss is then computed from logits of which each
rank has some columns: they are never gathered. (Shoeybi et al. 2019, "Megatron-LM", section 3;
Korthikanti et al. 2022, section 4.2.2, for sequences.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.collectives import all_gather, all_reduce, reduce_scatter
from minidist.comm import Communicator
from minidist.model import GPT, MLP, Attention, RMSNorm, rms_norm, widen

Map = Callable[..., Tensor]  # of a tensor, and of what else the map needs

# ---------------------------------------------------------------- f, g and their like


class Adjoint(torch.autograd.Function):
    """A linear map whose backward is another one: its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, backward: Map, more: tuple[Any, ...]) -> Tensor:
        ctx.adjoint, ctx.more = backward, more
        return forward(x, *more)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.adjoint(gradient, *ctx.more), None, None, None


def adjoint(x: Tensor, forward: Map, backward: Map, *more: Any) -> Tensor:
    """Return `forward(x, *more)`, whose gradient is `backward(gradient, *more)`."""
    result: Tensor = Adjoint.apply(x, forward, backward, more)  # type: ignore[no-untyped-call]
    return result


def copy_to(x: Tensor, comm: Communicator) -> Tensor:
    """Return `x`, with which each rank computes its part; backward sums gradients (f)."""
    return adjoint(x, same, summed, comm)


def reduce_from(x: Tensor, comm: Communicator) -> Tensor:
    """Return the sum of all ranks' `x`; backward hands its gradient to each of them (g)."""
    return adjoint(x, summed, same, comm)


def gather_tokens(x: Tensor, comm: Communicator) -> Tensor:
    """Return all ranks' tokens [B, T, D] of [B, T/P, D]; backward sums and scatters (f of sp)."""
    return adjoint(x, gathered, scattered, comm)


def scatter_tokens(x: Tensor, comm: Communicator) -> Tensor:
    """Return this rank's tokens [B, T/P, D] of the sum of all [B, T, D]; backward gathers (g)."""
    return adjoint(x, scattered, gathered, comm)


def same(x: Tensor, comm: Communicator) -> Tensor:
    """Return `x`: there is nothing to send."""
    return x


def summed(x: Tensor, comm: Communicator) -> Tensor:
    """Return the sum of all ranks' `x` in a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce(total, comm)
    return total


def gathered(x: Tensor, comm: Communicator) -> Tensor:
    """Join the tokens of all ranks: [B, T/P, D] becomes [B, T, D]."""
    parts = all_gather(x, comm).view(comm.size, *x.shape)  # [P, B, T/P, D]
    return torch.cat(tuple(parts), dim=1)


def scattered(x: Tensor, comm: Communicator) -> Tensor:
    """Return this rank's tokens of the sum: [B, T, D] becomes [B, T/P, D]."""
    parts = torch.stack(x.chunk(comm.size, dim=1))  # [P, B, T/P, D]
    own: Tensor = reduce_scatter(parts, comm)
    return own.view(parts.shape[1:])


# ---------------------------------------------------------------- the idea


def mlp(
    x: Tensor,  # [B, T, D], the same on every rank
    gate: Tensor,  # [C/P, D]: this rank's rows
    up: Tensor,  # [C/P, D]
    down: Tensor,  # [D, C/P]: this rank's columns
    comm: Communicator,
) -> Tensor:
    """Return down(silu(gate(x)) * up(x)) [B, T, D] on every rank; collective, as is its backward.

    Attention is cut in the same way, by heads.
    """
    x = copy_to(x, comm)  # f
    gated = F.silu(F.linear(x, gate))  # [B, T, C/P]
    inside = gated * F.linear(x, up)
    term = F.linear(inside, down)  # [B, T, D], one of P
    return reduce_from(term, comm)  # g


# ---------------------------------------------------------------- a model, changed from outside

# Linear weights are [outputs, inputs], and the embedding is [V, D].
CUT_ALONG_0 = ("query", "key", "value", "gate", "up", "embedding", "head")  # column-parallel
CUT_ALONG_1 = ("output", "down")  # row-parallel


class Block(NamedTuple):
    """Part of a whole parameter that a rank has: indices `first` to `last` - 1 along `dim`."""

    shape: tuple[int, ...]  # of the whole
    dim: int
    first: int
    last: int


def block_of(parameter: Tensor) -> Block:
    """Return which part of the whole parameter this is; all of it, unless `cut` has cut it."""
    shape = tuple(parameter.shape)
    whole = Block(shape, 0, 0, shape[0])
    return getattr(parameter, "block", whole)


def cut(parameter: nn.Parameter, dim: int, comm: Communicator) -> None:
    """Keep only this rank's part of a parameter, and write down which part it is."""
    shape = tuple(parameter.shape)
    first = shape[dim] * comm.rank // comm.size
    last = shape[dim] * (comm.rank + 1) // comm.size
    own = parameter.detach().narrow(dim, first, last - first)
    parameter.data = own.contiguous().clone()
    parameter.block = Block(shape, dim, first, last)  # type: ignore[attr-defined]


def tensor_parallel(model: GPT, comm: Communicator, sequence: bool = False) -> None:
    """Cut a model for the ranks of `comm`. Its logits are then this rank's columns [B, T, V/P].

    The model is the same on every rank before. Use `cross_entropy_sum` of this page for the loss.
    With `sequence` parallelism, T must divide by the number of ranks.
    """
    config, ranks = model.config, comm.size
    if config.heads % ranks or config.key_value_heads % ranks:
        heads = f"heads={config.heads}, key_value_heads={config.key_value_heads}"
        raise ValueError(f"{heads} do not divide by --tp {ranks}: each rank takes whole heads")

    def norm_of_own_tokens(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        # A rank's tokens give a part of the weight's gradient. We sum it inside the graph, by f. A
        # hook on the parameter would sum twice when a layer is recomputed.
        return rms_norm(x, copy_to(weight, comm), epsilon)

    f, g = (gather_tokens, scatter_tokens) if sequence else (copy_to, reduce_from)
    for name, parameter in model.named_parameters():  # a tied matrix comes once: as the embedding
        part = name.split(".")[-2]
        if part in CUT_ALONG_0:
            cut(parameter, 0, comm)
        elif part in CUT_ALONG_1:
            cut(parameter, 1, comm)
    model.embedding = VocabularyParallelEmbedding(model.get_parameter("embedding.weight"))
    for module in model.modules():
        region = isinstance(module, Attention | MLP)
        if region or module is model.head:
            module.register_forward_pre_hook(lambda _, inputs: (f(inputs[0], comm), *inputs[1:]))
        if region or module is model.embedding:
            module.register_forward_hook(lambda module, inputs, output: g(output, comm))
        if sequence and isinstance(module, RMSNorm):
            module.normalize = norm_of_own_tokens


class VocabularyParallelEmbedding(nn.Module):
    """An embedding of which this rank has some rows; the others' words become zeros."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up `tokens` [B, T]: [B, T, D], to be summed over ranks."""
        place, here = own_place(tokens, block_of(self.weight))
        rows = F.embedding(place, self.weight)
        return rows * here.unsqueeze(-1)


def own_place(words: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Return each word's place in this rank's part of the vocabulary, or 0, and whether it is there."""
    here = (words >= block.first) & (words < block.last)
    place = torch.where(here, words - block.first, 0)
    return place, here


def cross_entropy_sum(
    logits: Tensor,  # [B, T, V/P]: this rank's columns
    targets: Tensor,  # [B, T]
    block: Block,  # that of the head's weight
    comm: Communicator,
) -> Tensor:
    """Return the sum of -log p(target) over tokens, the same on every rank.

    log p = logit[target] - log Σ exp(logit): each rank adds its columns' terms to both, so three
    numbers a token are all-reduced, and never V of them.
    """
    logits = widen(logits)
    highest = logits.detach().amax(-1)
    all_reduce(highest, comm, "max")
    logits = logits - highest.unsqueeze(-1)  # now no exponential overflows
    exponentials = logits.exp().sum(-1)  # [B, T], of this rank's columns
    denominator = reduce_from(exponentials, comm)
    place, here = own_place(targets, block)
    own = logits.gather(-1, place.unsqueeze(-1)).squeeze(-1)
    picked = reduce_from(own * here, comm)  # only one rank has a target's logit
    return (denominator.log() - picked).sum()
