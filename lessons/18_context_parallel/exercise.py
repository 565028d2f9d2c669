"""Lesson 18: split a sequence over the ranks, attention included.

    rank r has T/P tokens: their queries, keys and values [B, H, T/P, d]

    ring       the queries stay; keys and values go round, and each rank merges what it finds in each block
    Ulysses    an all-to-all exchanges tokens for heads; each rank attends to all tokens with H/P heads; and back

Everywhere the mask is causal: a token sees itself and the tokens before it. There may be fewer
heads of keys and values, H_kv, than of queries: H_kv divides H, and head h of the queries reads
head h // (H / H_kv). Fill in the functions; their docstrings are the contract. Lesson 17's work is
given:

    attend(query, key, value, causal)             returns output [B, H, Tq, d], and lse [B, H, Tq]: for each query the
                                                  logarithm of the sum of exp(score) over the keys.
                                                  If causal, query i sees keys 0 to i.
    attend_backward(gradient, query, key, value, output, lse, causal)
                                                  returns the gradients of query, key and value,
                                                  given that of the output. It computes each weight
                                                  as exp(score - lse).

and for messages:

    comm.rank, comm.size
    comm.exchange(outgoing, to, incoming, source)     sends one tensor and receives another; both contiguous (task 2)
    all_to_all(full, comm)                            cuts the first axis into P chunks, sends chunk j to rank j, and
                                                      returns the chunks that arrived, by sender
                                                      (task 4)

You are building what `minidist.full.context` does, so calling that scores nothing, `flash.py`
excepted.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 18             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import minidist
from minidist import Communicator
from minidist.full.collectives import all_to_all  # noqa: F401  # for your answer
from minidist.full.context.flash import attend, attend_backward  # noqa: F401  # for your answers
from minidist.full.model import GPT, GPTConfig, Where
from minidist.full.model.attention import causal_attention

# ---------------------------------------------------------------- task 1: meet a block of keys


def meet(
    query: Tensor, output: Tensor, lse: Tensor, key: Tensor, value: Tensor, causal: bool
) -> None:
    """Task 1: let queries attend to one more block of keys and values, and merge the result into
    theirs, in place.

    Parameters
    ----------
    query : Tensor
        [B, H, Tq, d].
    output, lse : Tensor
        [B, H, Tq, d] and [B, H, Tq]: the result for all blocks so far, to be overwritten
        (`output.copy_(...)`) with the result for these and the new block together. Before the first
        block the output is 0, and lse is -inf.
    key, value : Tensor
        [B, H_kv, Tk, d]: the new block. Leave it, and the query, as they are.
    causal : bool
        For `attend`, which gives you output' and lse' of the block alone.

    Softmax over all keys is a mean of the two outputs, weighted with exp(lse) and exp(lse'). Find a
    form in which nothing overflows: a score may be 10,000 or -10,000, and exp(10,000) is infinite.
    Only the difference of the two lse counts. `torch.logaddexp` helps with the new lse.
    """
    raise NotImplementedError("task 1 is not started")


# ---------------------------------------------------------------- task 2: around the ring

# In task 2, rank r has the tokens r T/P to (r + 1) T/P. In step s = 0, 1, ..., P - 1, a rank has
# the block (keys and values) of rank (r - s) mod P: first its own, and then those that come from
# the left. It passes each on to the right, rank (r + 1) mod P. Multiply with torch, not with numpy:
# the grader counts what torch multiplies.


def ring_forward(
    query: Tensor, key: Tensor, value: Tensor, comm: Communicator
) -> tuple[Tensor, Tensor]:
    """Task 2: return output and lse of causal attention of this rank's tokens to the tokens of all
    ranks.

    Parameters
    ----------
    query : Tensor
        [B, H, T/P, d].
    key, value : Tensor
        [B, H_kv, T/P, d].

    Returns
    -------
    tuple of Tensor
        The output [B, H, T/P, d], and lse [B, H, T/P].

    A rank's own block is causal. It sees all of a block of an earlier rank, and nothing of a block
    of a later rank: it only passes this on.

    Messages: P - 1 steps, with `comm.exchange` to the right neighbour and from the left one. In
    each step a rank sends one block, of H_kv heads, in one or two messages. No collectives.

    Memory: besides the arguments, never more than the size of eight blocks, however many ranks
    there are. Do not change the arguments: backward needs them as they are.
    """
    raise NotImplementedError("task 2 is not started")


def ring_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    comm: Communicator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Task 2: return the gradients of this rank's query, key and value.

    Parameters
    ----------
    gradient : Tensor
        [B, H, T/P, d]: that of the output.
    query, key, value, output, lse : Tensor
        What `ring_forward` got, and what it returned: the *merged* output and lse.

    The blocks go round a second time. With `attend_backward` each rank computes the gradients of
    the blocks that it sees, and of no others. It adds up what it finds for its own queries. What it finds for keys
    and values belongs to another rank: so a sum of gradients [2, B, H_kv, T/P, d] follows each
    block around, and each rank adds its term. After the last rank has added its term, the sum needs
    one more step to reach the rank whose block it is.

    Messages: a block makes P - 1 steps, and a sum of gradients P, to the right as in
    `ring_forward`. So a rank sends 2 P - 1 times the bytes of a block, in P to 4 P - 2 messages. No
    collectives. On one rank nothing is sent. Do not change the arguments.
    """
    raise NotImplementedError("task 2 is not started")


class RingAttention(torch.autograd.Function):
    """Given: your two functions as one that autograd knows. It keeps nothing of the size of T x
    T.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, comm: Communicator) -> Tensor:
        output, lse = ring_forward(query, key, value, comm)
        ctx.comm = comm
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *ring_backward(gradient, *ctx.saved_tensors, ctx.comm), None


# ---------------------------------------------------------------- task 3: which tokens a rank has


def positions(order: str, ranks: int, rank: int, time: int) -> Tensor:
    """Task 3: return which positions of a sequence of `time` tokens a rank has: int64 [T/P],
    ascending.

        12 tokens on 3 ranks    contiguous   0000 1111 2222
                                zigzag       00 11 22 22 11 00
                                striped      012 012 012 012

    In zigzag order the sequence is cut into 2 P chunks. Rank r has chunk r, and the r-th chunk from
    the end.

    Parameters
    ----------
    order : {"contiguous", "zigzag", "striped"}

    Raises
    ------
    ValueError
        If the tokens cannot be shared out evenly: P has to divide them, in zigzag order 2 P.
    """
    raise NotImplementedError("task 3 is not started")


class Meeting(NamedTuple):
    """Given: the part of a block that a rank has to compute. Slices count tokens of one rank, in
    its own order.

    Of `queries` and `keys`, all see all, or if `causal`, query i of these sees key j of those only
    if j <= i.
    """

    queries: slice = slice(None)
    keys: slice = slice(None)
    causal: bool = False


def meeting(order: str, mine: int, source: int, time: int) -> Meeting | None:
    """Task 3: return which queries of rank `mine` see which keys of rank `source`; each has `time`
    tokens (T/P).

    None if none of the queries sees any of the keys. What you return has to let through exactly the
    pairs in which the position of the query is not less than that of the key. The order says which
    rank has which positions. In zigzag order `time` is even.

    With it a ring works in every order. Count the pairs: in zigzag order each rank computes as many
    as each other.
    """
    raise NotImplementedError("task 3 is not started")


# ---------------------------------------------------------------- task 4: heads for tokens


def ulysses_attention(
    query: Tensor, key: Tensor, value: Tensor, everyones: Tensor, comm: Communicator
) -> Tensor:
    """Task 4: return causal attention of this rank's tokens to the tokens of all ranks: [B, H, T/P,
    d].

    Parameters
    ----------
    query : Tensor
        [B, H, T/P, d]: this rank's tokens, for all heads.
    key, value : Tensor
        [B, H_kv, T/P, d].
    everyones : Tensor
        int64 [T]: the positions of the tokens of rank 0, then those of rank 1, and so on. The order
        is any of task 3.

    First exchange: this rank keeps its share of the heads (the first rank has the first heads),
    sends its tokens of the other heads to the other ranks, and receives all tokens of its heads.
    `causal_attention(query, key, value)`, of [B, heads, T, d], takes tokens in the order of their
    positions (`Tensor.argsort` helps), and knows that heads may share keys. Then exchange the
    result back. Gradients must flow through it all: the backward of an all-to-all is the all-to-all
    that sends every chunk back, so write a `torch.autograd.Function`.

    If there are fewer heads of keys than ranks, several ranks need the same head. Then repeat each
    head P / H_kv times, copies next to each other (`repeat_interleave`), and no more.

    Raises
    ------
    ValueError
        If P does not divide H, or neither of P and H_kv divides the other. Raise it before you send
        anything.

    Messages: only all-to-alls: in forward, of 2 H + 2 max(H_kv, P) heads, each B T/P d numbers; in
    backward as many.
    """
    raise NotImplementedError("task 4 is not started")


# ---------------------------------------------------------------- task 5: the rest of a training step

PADDING = 0  # the token behind a row's end: nobody has to predict it


def share_of_the_loss(
    model: Callable[[Tensor, Where], Tensor], tokens: Tensor, mine: Tensor
) -> Tensor:
    """Task 5: return this rank's share of the loss, a scalar with gradients: all ranks' shares add
    up to the loss.

    The loss is the mean of -log p(next token) over *all* tokens of the batch whose next token is
    not `PADDING`.

    Parameters
    ----------
    model : callable
        `model(inputs, Where(positions=...))` maps this rank's tokens [B, T/P] and their positions
        [T/P] to logits [B, T/P, V], of the token after each. Its attention already reaches the
        tokens of all ranks.
    tokens : Tensor
        int64 [B, T + 1]: the whole rows, the same on every rank. The first T are inputs; the token
        after each, its label, is one place further on. Leave them as they are.
    mine : Tensor
        int64 [T/P]: the positions of this rank's tokens, as of task 3.

    After backward each rank has a part of each gradient, and their sum is the gradient of the loss.
    Messages: none but those of the model.
    """
    raise NotImplementedError("task 5 is not started")


# ---------------------------------------------------------------- try it


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    generator = torch.Generator().manual_seed(0)
    time = 4 * comm.size
    query, key, value = (
        torch.randn(1, comm.size, time, 8, generator=generator).double() for _ in range(3)
    )
    whole = causal_attention(query, key, value)

    def own(x: Tensor) -> Tensor:
        return x.chunk(comm.size, 2)[comm.rank].contiguous()

    def differs(found: Tensor, expected: Tensor) -> str:
        return f"differs from the whole one by {float((found - expected).detach().abs().max()):.0e}"

    def task_1() -> str:
        output, lse = torch.zeros_like(query), torch.full_like(query[..., 0], -torch.inf)
        for keys, values in zip(key.chunk(2, 2), value.chunk(2, 2), strict=True):
            meet(query, output, lse, keys, values, False)
        return differs(output, attend(query, key, value, False)[0])

    def task_2() -> str:
        leaves, everything = (
            [own(x).requires_grad_() for x in (query, key, value)],
            [query, key, value],
        )
        found = RingAttention.apply(*leaves, comm)
        gradients = torch.autograd.grad(found.sum(), leaves)
        for x in everything:
            x.requires_grad_()
        expected = torch.autograd.grad(causal_attention(*everything).sum(), everything)
        worst = max(
            float((mine - own(all_of)).abs().max())
            for mine, all_of in zip(gradients, expected, strict=True)
        )
        return f"{differs(found, own(whole))}, gradients by {worst:.0e}"

    def task_3() -> str:
        rank = positions("zigzag", comm.size, 0, time).tolist()
        return f"in zigzag order rank 0 has {rank}, and meets the last rank's keys at " + str(
            meeting("zigzag", 0, comm.size - 1, 4)
        )

    def task_4() -> str:
        return differs(
            ulysses_attention(own(query), own(key), own(value), torch.arange(time), comm),
            own(whole),
        )

    def task_5() -> str:
        model = GPT(
            GPTConfig(vocabulary=9, layers=1, hidden=8, heads=2, intermediate=8, sequence=time)
        )
        tokens = torch.arange(time + 1)[None] % 9
        loss = share_of_the_loss(model, tokens, torch.arange(time))
        return (
            f"alone, a rank's share is all of the loss: {loss.item():.2f}, expected about "
            f"{torch.tensor(9).log():.2f}"
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
