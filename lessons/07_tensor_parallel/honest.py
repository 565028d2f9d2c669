"""Lesson 07, an honest answer: tensor parallelism by hand, from the handout alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import minidist
from minidist import Communicator
from minidist.full.collectives import all_reduce
from minidist.full.collectives.fast import cut
from minidist.full.model.gpt import causal_attention  # task 3 says what it does

# ---------------------------------------------------------------- given


def part(size: int, rank: int, ranks: int) -> range:
    """Return which of `size` a rank holds, as `numpy.array_split` cuts: 10 over 4 ranks are 3, 3, 2
    and 2.
    """
    counts = cut(size, ranks)
    start = sum(counts[:rank])
    return range(start, start + counts[rank])


# ---------------------------------------------------------------- task 1: the two borders


def summed(x: Tensor, comm: Communicator) -> Tensor:
    """Return the sum of all ranks' `x` in a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce(total, comm)
    return total


class Enter(torch.autograd.Function):
    """f: the identity, whose backward sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        """Return x."""
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the sum of all ranks' gradients."""
        return summed(gradient, ctx.comm), None


class Leave(torch.autograd.Function):
    """g: the sum over the ranks, whose backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        """Return the sum of all ranks' x."""
        return summed(x, comm)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient as it is."""
        return gradient, None


def copy_to(x: Tensor, comm: Communicator) -> Tensor:
    """Task 1, f: enter a region in which every rank computes something else with its copy of
    `x`.
    """
    result: Tensor = Enter.apply(x, comm)
    return result


def reduce_from(x: Tensor, comm: Communicator) -> Tensor:
    """Task 1, g: leave the region: return the sum of all ranks' `x`."""
    result: Tensor = Leave.apply(x, comm)
    return result


# ---------------------------------------------------------------- task 2: an MLP


def mlp_slices(whole: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """Task 2: return what `rank` of `ranks` holds of the MLP  down(gelu(up(x)))."""
    here = part(len(whole["up.weight"]), rank, ranks)
    channels = slice(here.start, here.stop)
    mine = {
        "up.weight": whole["up.weight"][channels],
        "up.bias": whole["up.bias"][channels],
        "down.weight": whole["down.weight"][:, channels],
        "down.bias": whole["down.bias"],
    }
    return {name: tensor.detach().clone() for name, tensor in mine.items()}


def parallel_mlp(x: Tensor, mine: Mapping[str, Tensor], comm: Communicator) -> Tensor:
    """Task 2: return, on every rank, the whole down(gelu(up(x))): forward and gradients as without
    ranks.
    """
    hidden = F.gelu(F.linear(copy_to(x, comm), mine["up.weight"], mine["up.bias"]))  # [B, T, C/P]
    return reduce_from(F.linear(hidden, mine["down.weight"]), comm) + mine["down.bias"]


# ---------------------------------------------------------------- task 3: attention


def attention_slices(
    whole: Mapping[str, Tensor], heads: int, rank: int, ranks: int
) -> dict[str, Tensor]:
    """Task 3: return what `rank` of `ranks` holds of an attention layer: some heads, none of them
    cut.
    """
    if heads % ranks:
        raise ValueError(f"{heads} heads cannot be shared out evenly among {ranks} ranks")
    head_dim = len(whole["query"]) // heads
    here = part(heads, rank, ranks)
    channels = slice(here.start * head_dim, here.stop * head_dim)
    mine = {name: whole[name][channels] for name in ("query", "key", "value")}
    mine["output"] = whole["output"][:, channels]
    return {name: tensor.detach().clone() for name, tensor in mine.items()}


def parallel_attention(
    x: Tensor, mine: Mapping[str, Tensor], head_dim: int, comm: Communicator
) -> Tensor:
    """Task 3: return, on every rank, the whole causal attention of x [B, T, D]: forward and
    gradients.
    """
    x = copy_to(x, comm)

    def heads_of(name: str) -> Tensor:
        # [B, H/P, T, d]
        return F.linear(x, mine[name]).unflatten(-1, (-1, head_dim)).transpose(1, 2)

    attended = causal_attention(heads_of("query"), heads_of("key"), heads_of("value"))
    return reduce_from(F.linear(attended.transpose(1, 2).flatten(2), mine["output"]), comm)


# ---------------------------------------------------------------- tasks 4 and 5: words


def local_words(words: Tensor, vocabulary: int, comm: Communicator) -> tuple[Tensor, Tensor]:
    """Return the place of each word among this rank's, 0 for those of other ranks, and which are
    this rank's.
    """
    here = part(vocabulary, comm.rank, comm.size)
    is_here = (words >= here.start) & (words < here.stop)
    return torch.where(is_here, words - here.start, 0), is_here


def parallel_embedding(tokens: Tensor, mine: Tensor, vocabulary: int, comm: Communicator) -> Tensor:
    """Task 4: return, on every rank, the vectors [B, T, D] of `tokens`."""
    places, is_here = local_words(tokens, vocabulary, comm)
    vectors = F.embedding(places, mine).masked_fill(~is_here.unsqueeze(-1), 0.0)
    return reduce_from(vectors, comm)


def parallel_cross_entropy(
    logits: Tensor, targets: Tensor, vocabulary: int, comm: Communicator
) -> Tensor:
    """Task 5: return, on every rank, the mean over tokens of -log softmax(all logits)[target]."""
    largest = logits.detach().amax(dim=1)
    all_reduce(largest, comm, op="max")
    shifted = logits - largest.unsqueeze(1)
    total = reduce_from(shifted.exp().sum(dim=1), comm)
    places, is_here = local_words(targets, vocabulary, comm)
    of_target = shifted.gather(1, places.unsqueeze(1)).squeeze(1).masked_fill(~is_here, 0.0)
    return (total.log() - reduce_from(of_target, comm)).mean()


# ---------------------------------------------------------------- try it


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    x = draw(1, 3, 8)

    def task_1() -> str:
        term = torch.full((2,), float(comm.rank), requires_grad=True)
        total = reduce_from(copy_to(term, comm), comm)
        total.sum().backward()
        return (
            f"the sum of 0, 1, ... is {total.tolist()}, and its gradient, summed by f, {term.grad}"
        )

    def task_2() -> str:
        whole = {
            "up.weight": draw(10, 8),
            "up.bias": draw(10),
            "down.weight": draw(8, 10),
            "down.bias": draw(8),
        }
        expected = F.linear(
            F.gelu(F.linear(x, whole["up.weight"], whole["up.bias"])), *list(whole.values())[2:]
        )
        found = parallel_mlp(x, mlp_slices(whole, comm.rank, comm.size), comm)
        return f"the MLP differs from the whole one by {float((found - expected).abs().max()):.0e}"

    def task_3() -> str:
        heads = 2 * comm.size
        whole = {name: draw(2 * heads, 8) for name in ("query", "key", "value")} | {
            "output": draw(8, 2 * heads)
        }
        mine = attention_slices(whole, heads, comm.rank, comm.size)
        query, key, value = (
            F.linear(x, whole[n]).view(1, 3, -1, 2).transpose(1, 2)
            for n in ("query", "key", "value")
        )
        expected = F.linear(
            causal_attention(query, key, value).transpose(1, 2).flatten(2), whole["output"]
        )
        found = parallel_attention(x, mine, head_dim=2, comm=comm)
        return (
            f"attention differs from the whole one by {float((found - expected).abs().max()):.0e}"
        )

    def task_4() -> str:
        table, tokens = draw(11, 4), torch.tensor([[0, 5, 10]])
        here = part(11, comm.rank, comm.size)
        vectors = parallel_embedding(tokens, table[here.start : here.stop], 11, comm)
        return (
            "the vectors differ from the table's by "
            f"{float((vectors - table[tokens]).abs().max()):.0e}"
        )

    def task_5() -> str:
        logits, targets = draw(5, 11), torch.tensor([0, 3, 5, 8, 10])
        here = part(11, comm.rank, comm.size)
        loss = parallel_cross_entropy(logits[:, here.start : here.stop], targets, 11, comm)
        return (
            f"the loss is {float(loss):.6f}, of the whole logits "
            f"{float(F.cross_entropy(logits, targets)):.6f}"
        )

    for number, task in enumerate((task_1, task_2, task_3, task_4, task_5), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
