"""Lesson 08, tasks 1 to 3: the programs that run beside an answer, and their judges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
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
    """Run task 2, and count what autograd saves besides parameters and the input, each storage
    once.
    """
    x = own(given["x"], comm)
    mine = {
        name: torch.tensor(given[name]) if dim is None else own(given[name], comm, dim)
        for name, dim in CUTS.items()
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
    return {
        **{name: gradient.numpy() for name, gradient in gradients.items()},
        "sum_partial_gradients": calls(trace),
    }


def expect_calls(
    results: Sequence[Arrays], notes: Sequence[Note], bytes: int, **expected: Sequence[str]
) -> None:
    """Raise `Wrong` unless just these collectives were called, of so many bytes each. Alone, none
    of them sends.
    """
    expect_collectives(notes)
    for rank, result in enumerate(results if len(results) > 1 else ()):
        for phase, names in expected.items():
            found = spelled(result[phase])
            wanted = ", ".join(f"{name} of {bytes} bytes" for name in names)
            if found != wanted:
                raise Wrong(
                    f"rank {rank} of {len(results)}: {phase} calls {found}, expected {wanted}"
                )


def part(array: Array, case: Case, rank: int, dim: int | None = TIME) -> Array:
    """Return a rank's part."""
    return array if dim is None else np.array_split(array, case.ranks, axis=dim)[rank]


def judge_border(gathers: bool) -> Judge:
    """Compare with all slices, and with a slice of the sum."""

    def judge(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
        xs, gradients = ([given[name] for given in case.given] for name in ("x", "gradient"))
        slices, terms = (xs, gradients) if gathers else (gradients, xs)
        every = np.concatenate(
            [part(array, case, rank) for rank, array in enumerate(slices)], axis=TIME
        )
        for rank, result in enumerate(results):
            contract.expect_dtype(rank, "what forward returns", result["out"], xs[rank])
            own, alone = part(np.sum(terms, axis=0), case, rank), part(terms[rank], case, rank)
            rows = np.concatenate(
                [part(array, case, number) for number, array in enumerate(slices)]
            )
            of_sum = {"each rank keeps its tokens of its own term, and adds nobody else's": alone}
            of_all = {"the first axis is gathered, which is the batch": rows.reshape(every.shape)}
            found = result["out"], result["the gradient of x"]
            joined, summed = found if gathers else found[::-1]
            padded = np.zeros_like(every)
            np.array_split(padded, case.ranks, axis=TIME)[rank][:] = part(every, case, rank)
            of_all |= {"only the rank's own tokens are filled in, and all others are 0": padded}
            of_all |= {"it is divided by the number of ranks": every / case.ranks}
            of_all |= {"it is multiplied by the number of ranks": every * case.ranks}
            pieces = [part(array, case, number) for number, array in enumerate(slices)]
            for order in permutations(range(case.ranks)) if case.ranks <= 4 else ():
                if list(order) != sorted(order):
                    story = (
                        "tokens are put together in the order of ranks "
                        f"{', '.join(map(str, order))}"
                    )
                    of_all[story] = np.concatenate([pieces[other] for other in order], axis=TIME)
            total = np.sum(terms, axis=0)
            of_sum |= {"the mean over the ranks is taken, not the sum": own / case.ranks}
            of_sum |= {"it is multiplied by the number of ranks": own * case.ranks}
            of_sum |= {"all tokens are kept, and not only the rank's own": total}
            of_sum |= {
                "the first axis is cut, which is the batch": np.array_split(total, case.ranks)[rank]
            }
            of_sum |= {
                "the last axis is cut, which is the channels": np.array_split(
                    total, case.ranks, axis=-1
                )[rank]
            }
            others = [part(total, case, other) for other in range(case.ranks)]
            each = [part(term, case, rank) for term in terms]
            names = ("what forward returns", "the gradient of x")[:: 1 if gathers else -1]
            contract.expect_equal(rank, names[0], joined, every, instead=of_all)
            contract.expect_equal(
                rank, names[1], summed, own, instead=of_sum, others=others, parts=each
            )
        both = ["all_gather"], ["reduce_scatter"]
        forward, backward = both if gathers else both[::-1]
        expect_calls(results, notes, xs[0].nbytes, forward=forward, backward=backward)

    return judge


def other_blocks(x: Tensor, weights: Mapping[str, Tensor], ranks: int) -> dict[str, Tensor]:
    """Return what comes out of a whole block by mistake."""

    def norm(
        x: Tensor, scaled: bool = True, over: tuple[int, ...] = (-1,), root: bool = True
    ) -> Tensor:
        square = x.square().mean(over, keepdim=True) + 1e-5
        return (
            x
            * (square.rsqrt() if root else 1 / square)
            * (weights["norm.weight"] if scaled else 1.0)
        )

    def branch(
        x: Tensor, function: Callable[[Tensor], Tensor] = F.gelu, biased: bool = True
    ) -> Tensor:
        up = F.linear(x, weights["up.weight"], weights["up.bias"] if biased else None)
        return F.linear(function(up), weights["down.weight"])

    bias, right = weights["down.bias"], branch(norm(x))
    found = {
        "the residual x is left out": right + bias,
        "the residual is the norm's output, not x": norm(x) + right + bias,
        "x is added twice": 2 * x + right + bias,
        "the norm is left out": x + branch(x) + bias,
        "the norm does not scale by its weight": x + branch(norm(x, scaled=False)) + bias,
        "the norm takes the mean over tokens and channels": x
        + branch(norm(x, over=(-2, -1)))
        + bias,
        "the norm divides by the mean square, and not by its root": x
        + branch(norm(x, root=False))
        + bias,
        "the norm comes after the sum with x, not before up": norm(x + branch(x) + bias),
        "the norm comes after down, not before up": x + norm(branch(x) + bias),
        "up.bias is left out": x + branch(norm(x), biased=False) + bias,
        "down.bias is left out": x + right,
        "down.bias is divided by the number of ranks": x + right + bias / ranks,
        "the sum over the ranks is divided by their number": x + right / ranks + bias,
        "gelu comes once more after down": x + F.gelu(right) + bias,
    }
    if x.shape[1] % ranks == 0:
        own = torch.cat([norm(each, over=(-2, -1)) for each in x.tensor_split(ranks, 1)], 1)
        found["the norm takes the mean over a rank's tokens and channels"] = x + branch(own) + bias
    for story, function in ACTIVATIONS.items():
        found[story] = x + branch(norm(x), function) + bias
    return found


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu is left out": lambda hidden: hidden,
    "gelu is approximated by tanh": lambda hidden: F.gelu(hidden, approximate="tanh"),
    "it is relu, and not gelu": F.relu,
    "it is silu, and not gelu": F.silu,
}


def judge_block(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """As the whole block; of what is kept for backward, one tensor of all tokens and a few of this
    rank's.
    """
    given = case.given[0]
    x = torch.tensor(given["x"], requires_grad=True)
    weights = {name: torch.tensor(given[name]) for name in CUTS}
    for name in ("norm.weight", "down.bias"):
        # a copy for each token, so that its terms can be told
        weights[name] = weights[name].expand(x.shape).clone()
    for weight in weights.values():
        weight.requires_grad_()
    normed = weights["norm.weight"] * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5))
    hidden = F.gelu(F.linear(normed, weights["up.weight"], weights["up.bias"]))
    out = x + F.linear(hidden, weights["down.weight"]) + weights["down.bias"]
    out.backward(torch.tensor(given["gradient"]))
    wide, tokens = x.nbytes, x[..., 0].nbytes
    most = wide + (3 * wide + 2 * hidden.nbytes + 4 * tokens) // case.ranks
    more = {
        f"{name} is added before the reduce-scatter, {case.ranks} times": out.detach().numpy()
        + (case.ranks - 1) * what
        for name, what in (("down.bias", given["down.bias"]), ("x", given["x"]))
    }
    with torch.no_grad():
        plain = {name: torch.tensor(given[name]) for name in CUTS}
        more |= {
            story: wrong.numpy() for story, wrong in other_blocks(x, plain, case.ranks).items()
        }
    slopes = {
        "no gradient comes back through norm, up and down, as behind a detach": given["gradient"],
        "no gradient comes back through the residual": x.grad.numpy() - given["gradient"],
        "the branch's gradient is summed over the ranks once more": (
            given["gradient"] + case.ranks * (x.grad.numpy() - given["gradient"])
        ),
        "the branch's gradient is divided by the number of ranks": (
            given["gradient"] + (x.grad.numpy() - given["gradient"]) / case.ranks
        ),
    }
    for rank, result in enumerate(results):
        expected, instead = (
            part(out.detach().numpy(), case, rank),
            {k: part(v, case, rank) for k, v in more.items()},
        )
        contract.expect_close(
            rank, "what forward returns", result["out"], expected, instead=instead
        )
        of_x, mistakes = (
            part(x.grad.numpy(), case, rank),
            {story: part(v, case, rank) for story, v in slopes.items()},
        )
        contract.expect_close(
            rank, "the gradient of x", result["the gradient of x"], of_x, instead=mistakes
        )
        if (saved := int(result["saved"])) > most:
            why = (
                "all tokens of what is D wide "
                f"({wide} bytes) once, the rest for this rank's tokens only"
            )
            if normed_everywhere(case, results, weights["norm.weight"].grad.numpy()):
                why = (
                    "this is what comes out if tokens are gathered before the norm, so that each "
                    "rank norms all of them; it comes first, for the rank's own tokens"
                )
            raise Wrong(
                f"rank {rank}: {saved} bytes are kept for backward, expected at most {most}: {why}"
            )
        for name, dim in CUTS.items():
            gradient, instead = (
                part(weights[name].grad.numpy(), case, rank, TIME if dim is None else dim),
                {},
            )
            if dim is None:
                of_all = weights[name].grad.numpy().sum((0, 1))
                gradient, inside = (
                    gradient.sum((0, 1)),
                    f"{name} is used inside the region, where all tokens are",
                )
                instead = {inside: of_all, f"{inside}, divided by the ranks": of_all / case.ranks}
                instead[f"{inside}, on another rank only"] = 0 * of_all
            found = result[f"the gradient of {name}"]
            contract.expect_close(rank, f"the gradient of {name}", found, gradient, instead=instead)
    both = ["all_gather", "reduce_scatter"]
    expect_calls(results, notes, wide, forward=both, backward=both)


def normed_everywhere(case: Case, results: Sequence[Arrays], terms: Array) -> bool:
    """Tell whether each rank's gradient of the norm's weight has terms of all tokens: those of its
    own channels. All ranks together have each term once, as they should.
    """
    found = [result["the gradient of norm.weight"] for result in results]
    own = [part(terms, case, rank).sum((0, 1)) for rank in range(case.ranks)]
    if any(one.shape != right.shape for one, right in zip(found, own, strict=True)):
        return False
    total = terms.sum((0, 1))
    once = np.allclose(np.sum(found, axis=0), total)
    every = all(np.allclose(one, total) for one in found)
    return (once or every) and not np.allclose(found[0], own[0])


def judge_partial(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The norm's and the last bias's are summed, in one all-reduce."""
    for rank, result in enumerate(results):
        for name, dim in CUTS.items():
            every = [given[name] for given in case.given]
            total, name = np.sum(every, axis=0), f"the gradient of {name}"
            if dim is None:
                instead = {
                    "the sum is never written into the tensor, or it is not counted as incomplete": every[
                        rank
                    ],
                    "the mean is taken, not the sum": total / case.ranks,
                    "the sum is added to what is there, which is in it already": every[rank]
                    + total,
                    "the largest is taken, not the sum": np.max(every, axis=0),
                }
                for other in (
                    other for other, cut in CUTS.items() if cut is None and not name.endswith(other)
                ):
                    instead[f"it gets the sum of {other}"] = np.sum(
                        [given[other] for given in case.given], axis=0
                    )
                contract.expect_equal(
                    rank, name, result[name.split()[-1]], total, instead=instead, parts=every
                )
            else:
                instead = {
                    "it is summed as well, though it is complete, of other channels on each rank": total
                }
                contract.expect_equal(
                    rank, name, result[name.split()[-1]], every[rank], instead=instead
                )
    numbers = 2 * len(case.given[0]["norm.weight"])
    expect_calls(results, notes, 8 * numbers, sum_partial_gradients=["all_reduce"])
