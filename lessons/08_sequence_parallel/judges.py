"""Lesson 08, tasks 1 to 3: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from minidist import Communicator, Trace
from minidist.course.grader import contract
from minidist.course.grader.calls import calls, expect_collectives, forward_backward, spelled
from minidist.course.grader.contract import Array, Arrays, Case, Judge, Note, Program, Wrong

TIME = 1
CUTS = {"norm.weight": None, "up.weight": 0, "up.bias": 0, "down.weight": 1, "down.bias": None}


def own(array: Array, comm: Communicator, dim: int = TIME) -> Tensor:
    """Return this rank's part."""
    return torch.tensor(np.array_split(array, comm.size, axis=dim)[comm.rank])


def border(name: str) -> Program:
    """Return a program that runs one function of task 1 on tensors that are not contiguous."""
    gathers = name == "gather_tokens"

    def program(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
        x = own(given["x"], comm) if gathers else torch.tensor(given["x"])
        gradient = torch.tensor(given["gradient"]) if gathers else own(given["gradient"], comm)
        x, gradient = (each.movedim(0, -1).contiguous().movedim(-1, 0) for each in (x, gradient))
        return forward_backward(comm, lambda: getattr(exercise, name)(x, comm), {"x": x}, gradient)

    return program


def run_block(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2, and count what autograd saves besides parameters and the input, each storage once."""
    x = own(given["x"], comm)
    mine = {
        name: torch.tensor(given[name]) if dim is None else own(given[name], comm, dim) for name, dim in CUTS.items()
    }
    known = {tensor.untyped_storage().data_ptr() for tensor in (x, *mine.values())}
    saved: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in known:
            saved[storage.data_ptr()] = storage
        return tensor

    def forward() -> Tensor:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return exercise.sequence_block(x, mine, comm)

    found = forward_backward(comm, forward, {"x": x, **mine}, own(given["gradient"], comm))
    return {**found, "saved": sum(storage.nbytes() for storage in saved.values())}


def run_partial(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3."""
    comm.trace = trace = Trace()
    gradients = {name: torch.tensor(array) for name, array in given.items()}
    exercise.sum_partial_gradients(dict(gradients), comm)
    return {**{name: gradient.numpy() for name, gradient in gradients.items()}, "sum_partial_gradients": calls(trace)}


def expect_calls(results: Sequence[Arrays], notes: Sequence[Note], bytes: int, **expected: Sequence[str]) -> None:
    """Raise `Wrong` unless just these collectives were called, of so many bytes each. Alone, none of them sends."""
    expect_collectives(notes)
    for rank, result in enumerate(results if len(results) > 1 else ()):
        for phase, names in expected.items():
            found = spelled(result[phase])
            wanted = ", ".join(f"{name} of {bytes} bytes" for name in names)
            if found != wanted:
                raise Wrong(f"rank {rank} of {len(results)}: {phase} calls {found}, expected {wanted}")


def part(array: Array, case: Case, rank: int, dim: int | None = TIME) -> Array:
    """Return a rank's part."""
    return array if dim is None else np.array_split(array, case.ranks, axis=dim)[rank]


def judge_border(gathers: bool) -> Judge:
    """Compare with all slices, and with a slice of the sum."""

    def judge(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
        xs, gradients = ([given[name] for given in case.given] for name in ("x", "gradient"))
        slices, terms = (xs, gradients) if gathers else (gradients, xs)
        every = np.concatenate([part(array, case, rank) for rank, array in enumerate(slices)], axis=TIME)
        for rank, result in enumerate(results):
            own, alone = part(np.sum(terms, axis=0), case, rank), part(terms[rank], case, rank)
            rows = np.concatenate([part(array, case, number) for number, array in enumerate(slices)])
            of_sum = {"each rank keeps its tokens of its own term, and adds nobody else's": alone}
            of_all = {"the first axis is gathered, which is the batch": rows.reshape(every.shape)}
            found = result["out"], result["the gradient of x"]
            joined, summed = found if gathers else found[::-1]
            names = ("what forward returns", "the gradient of x")[:: 1 if gathers else -1]
            contract.expect_equal(rank, names[0], joined, every, instead=of_all)
            contract.expect_equal(rank, names[1], summed, own, instead=of_sum)
        both = ["all_gather"], ["reduce_scatter"]
        forward, backward = both if gathers else both[::-1]
        expect_calls(results, notes, xs[0].nbytes, forward=forward, backward=backward)

    return judge


def judge_block(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """As the whole block; of what is kept for backward, one tensor of all tokens and a few of this rank's."""
    given = case.given[0]
    x = torch.tensor(given["x"], requires_grad=True)
    weights = {name: torch.tensor(given[name]) for name in CUTS}
    for name in ("norm.weight", "down.bias"):
        weights[name] = weights[name].expand(x.shape).clone()  # a copy for each token, so that its terms can be told
    for weight in weights.values():
        weight.requires_grad_()
    normed = weights["norm.weight"] * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))
    hidden = F.gelu(F.linear(normed, weights["up.weight"], weights["up.bias"]))
    out = x + F.linear(hidden, weights["down.weight"]) + weights["down.bias"]
    out.backward(torch.tensor(given["gradient"]))
    wide, tokens = x.nbytes, x[..., 0].nbytes
    most = wide + (3 * wide + 2 * hidden.nbytes + 4 * tokens) // case.ranks
    more = {
        f"{name} is added before the reduce-scatter, {case.ranks} times": out.detach().numpy() + (case.ranks - 1) * what
        for name, what in (("down.bias", given["down.bias"]), ("x", given["x"]))
    }
    for rank, result in enumerate(results):
        expected, instead = part(out.detach().numpy(), case, rank), {k: part(v, case, rank) for k, v in more.items()}
        contract.expect_close(rank, "what forward returns", result["out"], expected, instead=instead)
        contract.expect_close(rank, "the gradient of x", result["the gradient of x"], part(x.grad.numpy(), case, rank))
        if (saved := int(result["saved"])) > most:
            raise Wrong(
                f"rank {rank}: {saved} bytes are kept for backward, expected at most {most}: all tokens of what is D "
                f"wide ({wide} bytes) once, the rest for this rank's tokens only"
            )
        for name, dim in CUTS.items():
            gradient, instead = part(weights[name].grad.numpy(), case, rank, TIME if dim is None else dim), {}
            if dim is None:
                of_all = weights[name].grad.numpy().sum((0, 1))
                gradient, inside = gradient.sum((0, 1)), f"{name} is used inside the region, where all tokens are"
                instead = {inside: of_all, f"{inside}, divided by the ranks": of_all / case.ranks}
                instead[f"{inside}, on another rank only"] = 0 * of_all
            found = result[f"the gradient of {name}"]
            contract.expect_close(rank, f"the gradient of {name}", found, gradient, instead=instead)
    both = ["all_gather", "reduce_scatter"]
    expect_calls(results, notes, wide, forward=both, backward=both)


def judge_partial(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The norm's and the last bias's are summed, in one all-reduce."""
    for rank, result in enumerate(results):
        for name, dim in CUTS.items():
            every = [given[name] for given in case.given]
            total, name = np.sum(every, axis=0), f"the gradient of {name}"
            if dim is None:
                contract.expect_equal(rank, name, result[name.split()[-1]], total, before=every[rank])
            else:
                instead = {"it is summed as well, though it is complete, of other channels on each rank": total}
                contract.expect_equal(rank, name, result[name.split()[-1]], every[rank], instead=instead)
    numbers = 2 * len(case.given[0]["norm.weight"])
    expect_calls(results, notes, 8 * numbers, sum_partial_gradients=["all_reduce"])
