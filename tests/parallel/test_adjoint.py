"""Each differentiable collective's backward is its adjoint: finite differences across ranks, in
float64.

The ranks' programs together are one function of what all ranks bring. Its output is weighed by
random numbers and summed; each input number is moved, on its rank, and the change of the sum
compared with the gradient. Where an input is replicated all its copies move together; where an
output is, all ranks weigh it alike and it counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import minidist
from minidist.full.adjoint import (
    all_gather,
    all_to_all,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter,
    scatter_to,
)
from minidist.full.comm import Communicator, DeadlockError
from minidist.full.tensor.vocabulary import part_of, vocabulary_parallel_cross_entropy_sum

Call = Callable[[Tensor, Communicator], Tensor]
WHOLE = 7  # does not divide


@dataclass(frozen=True)
class Case:
    """A function, and which of its sides are replicated."""

    name: str
    call: Call
    shape: Callable[[Communicator], tuple[int, ...]] = lambda comm: (3, WHOLE, 2)
    input_replicated: bool = False
    output_replicated: bool = False


def own(comm: Communicator) -> int:
    return len(part_of(WHOLE, comm))


def counts(comm: Communicator) -> list[int]:
    """Rows that this rank sends to each: rank r sends (r + 2 j) mod 3 to rank j."""
    return [(comm.rank + 2 * to) % 3 for to in range(comm.size)]


CASES = [
    Case("copy_to", copy_to, input_replicated=True),
    Case("reduce_from", reduce_from, output_replicated=True),
    Case("all_reduce", lambda x, comm: copy_to(reduce_from(x, comm), comm)),
    Case("scatter_to", lambda x, comm: scatter_to(x, comm, 1), input_replicated=True),
    Case(
        "gather_from",
        lambda x, comm: gather_from(x, comm, 1, WHOLE),
        lambda comm: (3, own(comm), 2),
        output_replicated=True,
    ),
    Case(
        "all_gather", lambda x, comm: all_gather(x, comm, -1, WHOLE), lambda comm: (2, 3, own(comm))
    ),
    Case("reduce_scatter", lambda x, comm: reduce_scatter(x, comm, 1)),
    Case("all_to_all", all_to_all, lambda comm: (WHOLE, 2)),
    Case(
        "all_to_all counts",
        lambda x, comm: all_to_all(x, comm, counts(comm)),
        lambda comm: (sum(counts(comm)), 2),
    ),
]


def values(shape: tuple[int, ...] | torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def differences(comm: Communicator, case: Case) -> float:
    """Return the largest difference between a gradient and a finite difference."""
    x = values(case.shape(comm), 1 if case.input_replicated else 10 + comm.rank).requires_grad_()
    before, version = x.detach().clone(), x._version

    def weighed(y: Tensor) -> Tensor:
        return (y * values(y.shape, 2 if case.output_replicated else 20 + comm.rank)).sum()

    def everywhere() -> float:
        """Return the sum over ranks; a replicated output counts once."""
        with torch.no_grad():
            all_sums = comm.all_gather_object(weighed(case.call(x, comm)).item())
        return all_sums[0] if case.output_replicated else sum(all_sums)

    y = case.call(x, comm)
    assert torch.equal(x, before) and x._version == version, "the input was changed"
    incoming = values(y.shape, 2 if case.output_replicated else 20 + comm.rank)
    kept = incoming.clone()
    y.backward(incoming)
    assert torch.equal(incoming, kept), "the gradient was changed"
    assert x.grad is not None
    worst, base = 0.0, everywhere()
    for owner in [0] if case.input_replicated else range(comm.size):
        numbers = comm.all_gather_object(x.numel())[owner]
        for index in range(numbers):
            mine = case.input_replicated or comm.rank == owner
            if mine:
                x.data.view(-1)[index] += 0.5  # linear: any step will do
            change = (everywhere() - base) / 0.5
            if mine:
                x.data.view(-1)[index] -= 0.5
                worst = max(worst, abs(change - x.grad.view(-1)[index].item()))
    return worst


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_backward_is_the_adjoint(case: Case, ranks: int) -> None:
    assert max(minidist.run(lambda comm: differences(comm, case), ranks, debug=True)) < 1e-9


@pytest.mark.parametrize("wrong", [("gather_from", "all_gather"), ("all_gather", "gather_from")])
def test_the_two_gathers_are_not_the_same(wrong: tuple[str, str]) -> None:
    right, other = (next(case for case in CASES if case.name == name) for name in wrong)
    swapped = Case(
        "swapped", other.call, other.shape, right.input_replicated, right.output_replicated
    )
    assert max(minidist.run(lambda comm: differences(comm, swapped), 2)) > 0.1


def test_backward_can_be_differentiated_again() -> None:
    def program(comm: Communicator) -> tuple[Tensor, Tensor]:
        x = values((4,), comm.rank).requires_grad_()
        total = reduce_from(x**3, comm)
        (first,) = torch.autograd.grad(total.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return x.detach(), second

    for x, second in minidist.run(program, 3):
        assert torch.allclose(second, 6 * x)


def test_a_backward_that_one_rank_leaves_out_is_a_proved_deadlock() -> None:
    def program(comm: Communicator) -> None:
        y = copy_to(torch.ones(2, requires_grad=True), comm)
        if comm.rank == 0:
            y.sum().backward()

    with pytest.raises(DeadlockError):
        minidist.run(program, 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_cross_entropy_is_the_serial_one_and_holds_no_full_row(
    ranks: int, dtype: torch.dtype
) -> None:
    vocabulary, targets = 11, torch.tensor([[0, 10, -100], [5, 3, 3]])
    logits = (values((2, 3, vocabulary), 3) * 30).to(dtype).requires_grad_()
    wide = logits.to(torch.promote_types(dtype, torch.float32))
    expected = torch.nn.functional.cross_entropy(
        wide.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    expected.backward()
    assert logits.grad is not None

    def program(comm: Communicator) -> tuple[Tensor, Tensor]:
        part = part_of(vocabulary, comm)
        mine = logits.detach()[..., part.start : part.stop].clone().requires_grad_()
        loss = vocabulary_parallel_cross_entropy_sum(mine, targets, comm, vocabulary)
        messages = comm.traffic.messages
        loss.backward()
        assert comm.traffic.messages == messages, "backward needs no message"
        assert mine.grad is not None
        return loss.detach(), mine.grad

    found = minidist.run(program, ranks)
    tolerance = (
        {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-2, "atol": 1e-2}
    )
    gradient = torch.cat([piece for _, piece in found], dim=-1)
    assert torch.allclose(gradient, logits.grad, **tolerance)
    assert all(torch.equal(loss, found[0][0]) for loss, _ in found)
    assert torch.allclose(found[0][0], expected.detach(), rtol=tolerance["rtol"])


def test_cross_entropy_survives_huge_logits() -> None:
    def program(comm: Communicator) -> Tensor:
        logits = torch.full((1, 2), 3e4 * comm.rank, requires_grad=True)
        return vocabulary_parallel_cross_entropy_sum(logits, torch.tensor([3]), comm, 4).detach()

    for loss in minidist.run(program, 2):
        assert torch.allclose(loss, torch.tensor(2.0).log())


def test_mistakes_about_the_vocabulary_are_told() -> None:
    def program(comm: Communicator) -> None:
        logits = torch.zeros(1, 5)
        with pytest.raises(
            ValueError, match=r"brings logits of 5 words, but of a vocabulary of 5 it has [23]"
        ):
            vocabulary_parallel_cross_entropy_sum(logits, torch.tensor([3]), comm, 5)
        with pytest.raises(
            IndexError,
            match="token ids from 10 to 10 for a vocabulary of 10: they must lie in 0 to 9",
        ):
            vocabulary_parallel_cross_entropy_sum(logits, torch.tensor([10]), comm, 10)

    minidist.run(program, 2)
