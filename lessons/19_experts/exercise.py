"""Lesson 19: a router sends each token to k of E experts, and the experts are on other ranks.

    x [M, D] ─▶ router ─▶ scores [M, E] ─▶ the k best: choice, weights [M, k] ──────────────────────┐
       └─▶ k copies of each token, sorted by expert ─▶ to the experts' ranks ─▶ experts ─▶ back ─▶ weighted sum [M, D]

Experts are numbered by rank: with E experts on P ranks, rank r has the experts r E/P to (r + 1) E/P
- 1. P divides E. Fill in the functions; their docstrings are the contract. Lessons 02 and 07 are
given:

    all_reduce(x, comm)                       adds up a tensor over the ranks, in place
    all_to_all(x, comm)                       cuts the first axis into P equal chunks, sends chunk j to rank j, and
                                              returns the chunks that arrived, by sender; no
                                              gradient flows through it
    exchange(rows, comm, sent, received)      sends the first sent[0] rows to rank 0, the next sent[1] to rank 1, and so
                                              on, and returns the rows that arrived, by sender:
                                              received[j] from rank j. `rows` is a tensor [n, ...];
                                              `sent` and `received` are lists of P ints (of a
                                              tensor: `.tolist()`). Gradients flow through it:
                                              backward sends each row's gradient back.

All ranks must call the same of these in the same order, also a rank that has no rows to send.

You are building what `minidist.full.model.moe` and `minidist.full.expert` do, so calling these
scores nothing. Leave arguments as they are, unless a docstring says that you change them.

    mpirun -n 4 python exercise.py          try it on real processes
    python -m minidist grade 19             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import minidist
from minidist import Communicator
from minidist.full.adjoint import all_to_all as exchange  # noqa: F401  # for your answers
from minidist.full.collectives import all_reduce, all_to_all  # noqa: F401  # for your answers

# ---------------------------------------------------------------- task 1: route


def route(x: Tensor, router: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Task 1: choose k experts for each token, and say how much each of them counts.

    Parameters
    ----------
    x : Tensor
        Tokens [M, D]. They may be of 16 bits.
    router : Tensor
        [E, D]: a row for each expert. Gradients flow back to it, and to `x`.
    bias : Tensor
        [E]: what is added to an expert's score when experts are chosen, and for nothing else.

    Returns
    -------
    choice : Tensor
        int64 [M, k]: the k experts with the best scores + bias, the best one first. Of equal ones
        the expert with the smaller number comes first (`torch.topk` promises nothing here; `sort`
        has a `stable`).
    weights : Tensor
        [M, k]: of each chosen expert its score, without the bias. If k > 1, divide the k scores of
        a token by their sum, so that they add up to 1. If k = 1, take the score as it is. They are
        float32, or float64 if `x` is.

    A token's scores are the softmax, over *all* experts, of its products with the rows of `router`.
    `x` may be bfloat16 with a float32 router, or both are float64. Convert both to float32, to
    float64 if `x` is float64, before you multiply them: in 16 bits two scores may change places.

    The router learns through the weights alone, since a choice has no gradient.
    """
    raise NotImplementedError("task 1 is not started")


# ---------------------------------------------------------------- task 2: dispatch

Experts = Callable[[Tensor, list[int]], Tensor]
"""Maps rows [N, D], sorted by expert, to what this rank's experts make of them [N, D]; the list has
one number for each of its experts, how many of the rows are this expert's, and adds up to N.
"""


def dispatch(
    x: Tensor, choice: Tensor, weights: Tensor, experts: Experts, held: int, comm: Communicator
) -> Tensor:
    """Task 2: return for each token the weighted sum of what its experts make of it: [M, D].

    Parameters
    ----------
    x : Tensor
        This rank's tokens [M, D], float64. Ranks have different numbers of them, perhaps none.
    choice, weights : Tensor
        [M, k]: which of the E experts a token goes to (int64), and how much each counts (float64).
    experts : callable
        The experts of this rank. Call them once for all rows that came, or once for each sender.
    held : int
        How many experts each rank has: E = held P.

    Make a row for each choice, so M k rows, and sort them by expert. Tell every rank how many rows
    are coming to each of its experts: `held` integers (int64) in one all-to-all. Then send the
    rows, let the experts work, and send what they made back. Undo the sort, and add up what the k
    experts made of each token. Gradients flow back to `x`, to `weights`, and into `experts`.

    Messages: in forward three all-to-alls: the counts, the rows there, the rows back. In backward
    two. No row is sent that nobody chose, and no sum travels.
    """
    raise NotImplementedError("task 2 is not started")


# ---------------------------------------------------------------- task 3: balance


@dataclass
class Layer:
    """Given: what a layer of experts remembers beside its parameters.

    Attributes
    ----------
    bias : Tensor
        int64 [E]: of each expert how often its bias rose, less how often it fell.
    tally : Tensor
        int64 [E]: how many of this rank's choices fell on each expert since the last `rebalance`.
    """

    bias: Tensor
    tally: Tensor


def balance_loss(scores: Tensor, choice: Tensor, comm: Communicator) -> Tensor:
    """Task 3: return this rank's share of the auxiliary loss, a scalar with gradients.

    Parameters
    ----------
    scores : Tensor
        [B, T', E]: softmax scores of this rank's tokens: of each of B sequences it has T' tokens.
    choice : Tensor
        int64 [B, T', k].
    comm : Communicator
        The ranks that have the other tokens of the *same* sequences: all ranks' T' together are T.

    Of a sequence's k T choices the fraction f_e falls on expert e. The loss of a token is E sum_e
    f_e p_e, where p_e are its scores and f_e are the fractions of its own sequence. Return the sum
    of the losses of this rank's tokens. The fractions are counts: no gradient flows through them.
    """
    raise NotImplementedError("task 3 is not started")


def attach(weights: Tensor, loss: Tensor, layer: Layer, counts: Tensor) -> Tensor:
    """Task 3: return the weights, unchanged; backward through them trains the loss, too, and
    counts.

    Deep in a model nobody hands a loss on. So hang it on the weights, which the model's own loss
    depends on. Write a `torch.autograd.Function`. Its forward returns the weights
    (`weights.view_as(weights)`). Its backward returns the gradient of the weights as it came, and
    for `loss` the gradient 1. It also adds `counts` (int64 [E]) to `layer.tally`.

    Why in backward? With recomputation forward runs twice for each backward, and in evaluation
    there is a forward alone. A token has to be counted once for each time that it trains.
    """
    raise NotImplementedError("task 3 is not started")


def kept(
    choice: Tensor, positions: Tensor, time: int, experts: int, factor: float, comm: Communicator
) -> Tensor:
    """Task 3: return which choices have room: bool [B, T', k].

    Parameters
    ----------
    choice : Tensor
        int64 [B, T', k]: the experts that this rank's tokens chose; the k of one token differ.
    positions : Tensor
        int64 [T']: where in their sequence this rank's tokens stand. In any order.
    time, experts : int
        T and E.
    comm : Communicator
        The ranks that have the other tokens of the same sequences. All ranks' positions together
        are 0 to T - 1.

    In each sequence an expert serves the first C = ceil(factor k T / E) tokens that chose it, in
    the order of their positions (`math.ceil(factor * k * time / experts)`). All others are dropped.
    What is dropped must not depend on how tokens are spread over ranks.
    """
    raise NotImplementedError("task 3 is not started")


def rebalance(layer: Layer, comm: Communicator) -> None:
    """Task 3: move each bias by one, and begin a new tally. It is called once a step, after the
    last backward.

    An expert to which fewer tokens went than the mean over experts, counted over all ranks of
    `comm`, gets a bias of one more; one to which more went, of one less. All ranks end up with the
    same `layer.bias`, and with a tally of zeros.
    """
    raise NotImplementedError("task 3 is not started")


# ---------------------------------------------------------------- task 4: experts on ep ranks, in edp copies


def groups(comm: Communicator, ep: int) -> tuple[Communicator, Communicator]:
    """Task 4: return two groups that this rank belongs to: those who share the experts, and those
    who have the same.

        P = 6, ep = 3      ranks 0 1 2     share the experts, and so do ranks 3 4 5
                           ranks 0 3       have the same experts; so have ranks 1 4, and ranks 2 5

    The first group has `ep` neighbouring ranks; ep divides P. `comm.split(color)` returns the group
    of all ranks that call it with the same number, in their order. You may use it in this task,
    four times on a rank.
    """
    raise NotImplementedError("task 4 is not started")


def synchronize(
    router: Tensor, experts: Sequence[Tensor], tokens: int, edp: Communicator, comm: Communicator
) -> None:
    """Task 4: leave in `.grad` of each parameter the gradient of the mean loss over the tokens of
    all ranks.

    Parameters
    ----------
    router : Tensor
        A parameter that all ranks have.
    experts : sequence of Tensor
        The parameters of this rank's experts. Their `.grad` is None if no token came to this rank.
    tokens : int
        How many tokens this rank has. Ranks have different numbers.
    edp : Communicator
        The ranks that have the same experts.
    comm : Communicator
        All ranks.

    Each rank has run backward of the *sum* of the losses of its own tokens. Tokens travelled to
    their experts within each group of ep ranks, and gradients travelled back: so a rank's experts
    have, of every token of its group that came to them, the whole term, and of no token of another
    group.

    A `.grad` that is None counts as zeros, and its rank must still take part in the sum.
    """
    raise NotImplementedError("task 4 is not started")


# ---------------------------------------------------------------- try it


def main() -> None:
    """Try every task on the ranks that this was started on, and print what rank 0 sees."""
    comm = minidist.init()
    generator = torch.Generator().manual_seed(0)
    ranks, each = comm.size, 3
    x = torch.randn(4, 8, generator=generator).double()
    router = torch.randn(2 * ranks, 8, generator=generator).double().requires_grad_()

    def task_1() -> str:
        choice, weights = route(x, router, torch.zeros(2 * ranks).double(), 2)
        return (
            f"token 0 goes to the experts {choice[0].tolist()}, with weights {weights[0].tolist()}"
        )

    def task_2() -> str:
        choice = (torch.arange(4)[:, None] + torch.arange(2)) % (2 * ranks)
        weights = torch.full((4, 2), 0.5).double()

        def scaled(rows: Tensor, counts: list[int]) -> Tensor:
            """Multiply each row by the number of its expert."""
            numbers = 2 * comm.rank + torch.arange(2)
            return rows * numbers.repeat_interleave(torch.tensor(counts))[:, None]

        found = dispatch(x, choice, weights, scaled, 2, comm)
        expected = x * choice.double().mean(1)[:, None]
        return f"differs from the expected sum by {float((found - expected).abs().max()):.0e}"

    def task_3() -> str:
        choice = torch.zeros(1, each, 1, dtype=torch.int64)
        loss = balance_loss(torch.ones(1, each, 4) / 4, choice, comm)
        layer = Layer(torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64))
        attach(
            torch.ones(1).requires_grad_(), loss, layer, torch.tensor([each, 0, 0, 0])
        ).sum().backward()
        rebalance(layer, comm)
        places = comm.rank + ranks * torch.arange(each)
        room = kept(choice, places, each * ranks, 4, 1.0, comm)
        return (
            f"loss {loss.item():g}, bias {layer.bias.tolist()}, of rank 0's choices "
            f"{int(room.sum())} have room"
        )

    def task_4() -> str:
        share, copies = groups(comm, ranks)
        weight = torch.ones(1).double().requires_grad_()
        router.grad, weight.grad = torch.ones_like(router), torch.ones_like(weight)
        synchronize(router, [weight], 2, copies, comm)
        return (
            f"{share.size} ranks share the experts; gradients {router.grad[0, 0]:g} and "
            f"{weight.grad.item():g}"
        )

    for number, task in enumerate((task_1, task_2, task_3, task_4), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
