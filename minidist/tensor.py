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

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.collectives import all_gather, all_reduce, reduce_scatter
from minidist.comm import Communicator
from minidist.model import GPT, RMSNorm, rms_norm

Map: TypeAlias = Callable[[Tensor], Tensor]

# ---------------------------------------------------------------- f, g and their like


class Adjoint(torch.autograd.Function):
    """A linear map whose backward is another one: its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Map, backward: Map) -> Tensor:
        """Apply the map."""
        ctx.map = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Apply the adjoint."""
        return ctx.map(gradient), None, None


def adjoint(x: Tensor, forward: Map, backward: Map) -> Tensor:
    """Return `forward(x)`, whose gradient is `backward` of the gradient."""
    result: Tensor = Adjoint.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return result


def copy_to(x: Tensor, comm: Communicator) -> Tensor:
    """Return `x`, with which each rank computes its part; backward sums gradients (f)."""
    return adjoint(x, lambda x: x.view_as(x), lambda gradient: summed(gradient, comm))


def reduce_from(x: Tensor, comm: Communicator) -> Tensor:
    """Return the sum of all ranks' `x`; backward hands its gradient to each of them (g)."""
    return adjoint(x, lambda x: summed(x, comm), lambda gradient: gradient)


def gather_tokens(x: Tensor, comm: Communicator) -> Tensor:
    """Return all ranks' tokens [B, T, D] of [B, T/P, D]; backward sums and scatters (f of sp)."""
    return adjoint(x, lambda x: gathered(x, comm), lambda gradient: scattered(gradient, comm))


def scatter_tokens(x: Tensor, comm: Communicator) -> Tensor:
    """Return this rank's tokens [B, T/P, D] of the sum of all [B, T, D]; backward gathers (g)."""
    return adjoint(x, lambda x: scattered(x, comm), lambda gradient: gathered(gradient, comm))


def summed(x: Tensor, comm: Communicator) -> Tensor:
    """Return the sum of all ranks' `x` in a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce(total, comm)
    return total


def gathered(x: Tensor, comm: Communicator) -> Tensor:
    """Join the tokens of all ranks: [B, T/P, D] becomes [B, T, D]."""
    first = x.transpose(0, 1).contiguous()  # [T/P, B, D]: tokens have to come first to be joined
    return all_gather(first, comm).view(-1, *first.shape[1:]).transpose(0, 1)  # type: ignore[no-any-return]


def scattered(x: Tensor, comm: Communicator) -> Tensor:
    """Return this rank's tokens of the sum: [B, T, D] becomes [B, T/P, D]."""
    first = x.transpose(0, 1).contiguous()
    return reduce_scatter(first, comm).view(-1, *first.shape[1:]).transpose(0, 1)  # type: ignore[no-any-return]


# ---------------------------------------------------------------- the idea


def mlp(x: Tensor, own: Mapping[str, Tensor], comm: Communicator) -> Tensor:
    """Return down(silu(gate(x)) * up(x)) [B, T, D] on every rank; collective, as is its backward.

    `own` are this rank's channels: some rows of `gate` and `up` [C/P, D], the same columns of
    `down` [D, C/P]. Attention is cut in the same way, by heads.
    """
    inside = copy_to(x, comm)  # f
    hidden = F.silu(F.linear(inside, own["gate"])) * F.linear(inside, own["up"])  # [B, T, C/P]
    return reduce_from(F.linear(hidden, own["down"]), comm)  # g


# ---------------------------------------------------------------- a model, changed from outside


class Block(NamedTuple):
    """Part of a whole parameter that a rank has: indices `first` to `last` - 1 along `dim`."""

    shape: tuple[int, ...]
    dim: int
    first: int
    last: int


def block_of(parameter: Tensor) -> Block:
    """Return which part of the whole parameter this is; all of it, unless `cut` has cut it."""
    shape = tuple(parameter.shape)
    whole = Block(shape, 0, 0, shape[0])
    found: Block = getattr(parameter, "block", whole)
    return found


def cut(parameter: nn.Parameter, dim: int, comm: Communicator) -> None:
    """Keep only this rank's part of a parameter, and write down which part it is."""
    parts = parameter.detach().tensor_split(comm.size, dim)
    first = sum(part.shape[dim] for part in parts[: comm.rank])
    own = parts[comm.rank]
    last = first + own.shape[dim]
    parameter.block = Block(tuple(parameter.shape), dim, first, last)  # type: ignore[attr-defined]
    parameter.data = own.clone(memory_format=torch.contiguous_format)


def tensor_parallel(model: GPT, comm: Communicator, sequence: bool = False) -> None:
    """Cut a model for the ranks of `comm`. Its logits are then this rank's columns [B, T, V/P].

    Parameters
    ----------
    model : GPT
        The same on every rank. Use `cross_entropy_sum` of this page for the loss.
    sequence : bool
        Use sequence parallelism; T must divide by the number of ranks.

    Raises
    ------
    ValueError
        If heads, or heads of keys and values, cannot be dealt out evenly.
    """
    config, ranks = model.config, comm.size
    if config.heads % ranks or config.key_value_heads % ranks:
        heads = f"heads={config.heads}, key_value_heads={config.key_value_heads}"
        raise ValueError(f"{heads} do not divide by --tp {ranks}: each rank takes whole heads")
    enter, leave = (gather_tokens, scatter_tokens) if sequence else (copy_to, reduce_from)
    for layer in model.layers:
        for name in ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"):
            cut(layer.get_parameter(f"{name}.weight"), 0, comm)
        for name in ("attention.output", "mlp.down"):
            cut(layer.get_parameter(f"{name}.weight"), 1, comm)
        for name in ("attention", "mlp"):
            region = layer.get_submodule(name)
            around(region, lambda x: enter(x, comm), lambda x: leave(x, comm))
    words = model.get_parameter("embedding.weight")
    cut(words, 0, comm)
    if not config.tied:
        cut(model.get_parameter("head.weight"), 0, comm)
    model.embedding = VocabularyParallelEmbedding(words)
    around(model.embedding, None, lambda x: leave(x, comm))
    around(model.head, lambda x: enter(x, comm), None)
    if sequence:
        for parent in (model, *model.layers):
            for name, child in list(parent.named_children()):
                if isinstance(child, RMSNorm):
                    setattr(parent, name, NormOfOwnTokens(child, comm))


def around(module: nn.Module, enter: Map | None, leave: Map | None) -> None:
    """Have a module's first input pass through `enter`, and its output through `leave`."""
    if enter is not None:
        module.register_forward_pre_hook(lambda _, inputs: (enter(inputs[0]), *inputs[1:]))
    if leave is not None:
        module.register_forward_hook(lambda _, inputs, output: leave(output))


class VocabularyParallelEmbedding(nn.Module):
    """An embedding of which this rank has some rows; the others' words become zeros."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up `tokens` [B, T]: [B, T, D], to be summed over ranks."""
        place, here = own_place(tokens, block_of(self.weight))
        return F.embedding(place, self.weight) * here.unsqueeze(-1)


class NormOfOwnTokens(RMSNorm):
    """A norm under sequence parallelism: each rank's tokens give a part of the weight's gradient.

    The sum over ranks is in the graph, as f of the weight. In a hook on the parameter it would be
    taken twice where a layer recomputes itself: there autograd passes the parameter twice.
    """

    def __init__(self, norm: RMSNorm, comm: Communicator) -> None:
        super().__init__(len(norm.weight), norm.epsilon)
        self.weight, self.comm = norm.weight, comm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim of this rank's tokens."""
        return rms_norm(x, copy_to(self.weight, self.comm), self.epsilon)


def own_place(tokens: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Return each word's place in this rank's part of the vocabulary, or 0, and whether it is there."""
    here = (tokens >= block.first) & (tokens < block.last)
    return torch.where(here, tokens - block.first, 0), here


def cross_entropy_sum(logits: Tensor, targets: Tensor, block: Block, comm: Communicator) -> Tensor:
    """Return the sum of -log p(target) over tokens, the same on every rank.

    log p = logit[target] - log Σ exp(logit): each rank adds its columns' terms to both, so three
    numbers a token are all-reduced, and never V of them.

    Parameters
    ----------
    logits : Tensor [B, T, V/P]
        This rank's columns.
    targets : Tensor [B, T]
    block : Block
        Of the head's weight.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    highest = wide.detach().amax(-1)
    all_reduce(highest, comm, "max")
    shifted = wide - highest.unsqueeze(-1)  # so that no exponential overflows
    denominator = reduce_from(shifted.exp().sum(-1), comm)
    place, here = own_place(targets, block)
    picked = shifted.gather(-1, place.unsqueeze(-1)).squeeze(-1) * here
    return (denominator.log() - reduce_from(picked, comm)).sum()
