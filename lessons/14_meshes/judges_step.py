"""Lesson 14, task 3: the judge of a step on two axes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from judges import groups_of

from minidist.course.grader.contract import (
    Array,
    Arrays,
    Case,
    Note,
    Wrong,
    expect_close,
    known,
    sent_by,
)

TRAINED = {
    "own loss": "a rank returns the loss of its own rows",
    "after": "the loss is that after the step",
    "sum over dp": "the loss is the sum of the ranks' means along dp, not their mean",
    "sum over tp": "the loss is added up along tp as well, where all have the same",
    "by tp": "the loss is divided by tp as well",
    "half": "the loss is half of the mean of squares",
    "rows": "squares are divided by the rows alone, not by all elements",
    "total": "squares are added, not averaged",
    "linear": "relu is left out",
    "relu last": "relu comes after `down`, not between `up` and `down`",
    "residual": "x is added to what a block computes",
    "own mean": "gradients of the ranks' own means are added along dp, not averaged",
    "along tp": "gradients are averaged along tp as well, where they belong to other columns",
    "summed along tp": "gradients are added up along tp, where they belong to other columns",
    "not entered": "nothing is summed in backward where the region is entered",
    "over all": "gradients are divided by tp as well, where all have the same rows",
    "averaged twice": "gradients are divided by dp twice",
    "no step": "the values stay as they are",
    "uphill": "rate times the gradient is added, not subtracted",
    "twice": "the step is twice as large, or taken twice",
    "no rate": "the gradient is subtracted without the rate",
    "first alone": "only the first block takes a step",
    "last alone": "only the last block takes a step",
    "up alone": "only `up` takes a step",
    "down alone": "only `down` takes a step",
}
RATES = {
    "own mean": lambda dp, rate: dp,
    "averaged twice": lambda dp, rate: 1 / dp,
    "uphill": lambda dp, rate: -1,
}
RATES |= {
    "no step": lambda dp, rate: 0,
    "twice": lambda dp, rate: 2,
    "no rate": lambda dp, rate: 1 / rate,
}
RATES |= {"half": lambda dp, rate: 1 / 2, "sum over dp": lambda dp, rate: dp}


def two_steps(given: Sequence[Arrays], rank: int, how: str = "") -> dict[str, Array]:
    """Return the losses, and this rank's slices after two steps of the serial model; `how` is one
    of `TRAINED`.
    """
    dp, tp = map(int, given[0]["sizes"])
    x, targets = (
        torch.tensor(np.concatenate([each[name] for each in given[::tp]]))
        for name in ("x", "targets")
    )
    ups, downs, losses = given[0]["ups"].copy(), given[0]["downs"].copy(), []
    columns = np.split(np.arange(ups.shape[2]), tp)
    rate = given[0]["rate"] * RATES.get(how, lambda dp, rate: 1)(dp, float(given[0]["rate"]))
    of_loss = {
        "sum over dp": dp,
        "sum over tp": tp,
        "by tp": 1 / tp,
        "half": 1 / 2,
        "rows": x.shape[1],
    }
    of_loss |= {"total": x.numel()}
    rate *= of_loss.get(how, 1) if how in ("by tp", "rows", "total") else 1
    rate /= tp if how == "over all" else 1
    steps = {"up alone": (1, 0), "down alone": (0, 1)}.get(how, (1, 1))
    which = np.arange(len(ups))
    which = {"first alone": which == 0, "last alone": which == len(ups) - 1}.get(how, which >= 0)[
        :, None, None
    ]
    for _ in range(3):
        shares = columns if how == "not entered" else [columns]
        errors, gradients = backward(x, targets, ups, downs, shares, how)
        losses.append(
            float((np.split(errors, dp)[rank // tp] if how == "own loss" else errors).mean())
        )
        losses[-1] *= of_loss.get(how, 1)
        if len(losses) < 3:
            for values, gradient, axis, moves in (
                (ups, gradients[0], 2, steps[0]),
                (downs, gradients[1], 1, steps[1]),
            ):
                if how in ("along tp", "summed along tp"):
                    gradient = np.concatenate(
                        [np.mean(np.split(gradient, tp, axis), axis=0)] * tp, axis
                    )
                    gradient = gradient * (tp if how == "summed along tp" else 1)
                values -= rate * gradient * moves * which
    mine = columns[rank % tp]
    return {
        "losses": np.array(losses[how == "after" :][:2]),
        "ups": ups[:, :, mine],
        "downs": downs[:, mine],
    }


def apart(given: Sequence[Arrays], rank: int, part: bool) -> dict[str, Array]:
    """Return the same if each replica goes by its own gradient: of its part of the mean loss, or of
    its own mean.
    """
    dp, tp = map(int, given[0]["sizes"])
    models = [(given[0]["ups"].copy(), given[0]["downs"].copy()) for _ in range(dp)]
    losses: list[float] = []
    for _ in range(2):
        of_step = []
        for (ups, downs), each in zip(models, given[::tp], strict=True):
            x, targets = torch.tensor(each["x"]), torch.tensor(each["targets"])
            errors, gradients = backward(x, targets, ups, downs, [np.arange(ups.shape[2])])
            of_step.append(errors.mean())
            ups -= float(given[0]["rate"]) * gradients[0] / (dp if part else 1)
            downs -= float(given[0]["rate"]) * gradients[1] / (dp if part else 1)
        losses.append(float(np.mean(of_step)))
    mine = np.split(np.arange(models[0][0].shape[2]), tp)[rank % tp]
    return {
        "losses": np.array(losses),
        "ups": models[rank // tp][0][:, :, mine],
        "downs": models[rank // tp][1][:, mine],
    }


def first_losses(given: Sequence[Arrays], rank: int) -> dict[str, float]:
    """Return the first loss that a rank has if it goes wrong with other ranks' columns."""
    tp, ups, downs = int(given[0]["sizes"][1]), given[0]["ups"], given[0]["downs"]
    columns = np.split(np.arange(ups.shape[2]), tp)

    def loss(which: Sequence[Any], bend_last: bool) -> float:
        errors = []
        for each in given[::tp]:
            y = each["x"]
            for up, down in zip(ups, downs, strict=True):
                inner = [y @ up[:, one] for one in which]
                parts = [part if bend_last else np.maximum(part, 0) for part in inner]
                outer = [part @ down[one] for part, one in zip(parts, which, strict=True)]
                y = sum(np.maximum(part, 0) if bend_last else part for part in outer)
            errors.append(((y - each["targets"]) ** 2).mean())
        return float(np.mean(errors))

    return {
        "the region is not left: each rank goes on with the sum over its own columns": loss(
            [columns[rank % tp]], False
        ),
        "relu comes after `down`, not between `up` and `down`": loss(columns, True),
        "all of tp's columns are taken twice": loss([*columns, *columns], False),
    }


def backward(
    x: torch.Tensor,
    targets: torch.Tensor,
    ups: Array,
    downs: Array,
    shares: Sequence[Any],
    how: str = "",
) -> Any:
    """Return the squared errors, and the gradients of their mean, as those see it who each compute
    a share of columns.

    Each has the gradient of its own columns, which passes through its own columns of the blocks
    behind alone.
    """
    found = [np.zeros_like(ups), np.zeros_like(downs)]
    for share in shares:
        mine, parameters = (
            np.concatenate([np.ravel(share)]),
            [torch.tensor(v, requires_grad=True) for v in (ups, downs)],
        )
        y = x
        for up, down in zip(*parameters, strict=True):
            whole, own = block(y, up, down, how), block(y, up[:, mine], down[mine], how)
            y = own + (whole - own).detach()
        errors = (y - targets).square()
        errors.mean().backward()
        found[0][:, :, mine] = parameters[0].grad.numpy()[:, :, mine]
        found[1][:, mine] = parameters[1].grad.numpy()[:, mine]
    return errors.detach().numpy(), found


def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, how: str) -> torch.Tensor:
    """Return what a block computes; `how` is one of `TRAINED`."""
    if how in ("linear", "relu last"):
        return torch.relu(x @ up @ down) if how == "relu last" else x @ up @ down
    return torch.relu(x @ up) @ down + (x if how == "residual" else 0)


def judge_trained(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The slices of the serial model, and no more bytes on either axis than the places need."""
    first, (dp, tp) = case.given[0], map(int, case.given[0]["sizes"])
    for rank, result in enumerate(results):
        expected = two_steps(case.given, rank)
        wrongly = {
            clause: partial(two_steps, case.given, rank, how) for how, clause in TRAINED.items()
        }
        wrongly |= {
            "gradients are not reduced along dp": partial(apart, case.given, rank, True),
            "gradients are not reduced along dp, and each is that of a rank's own mean": partial(
                apart, case.given, rank, False
            ),
        }
        if abs(
            (loss := float(result["losses"][0])) - (right := expected["losses"][0])
        ) > 1e-9 * abs(right):
            why = known(
                first_losses(case.given, rank), lambda value: abs(value - loss) <= 1e-9 * abs(loss)
            )
            if why:
                raise Wrong(
                    f"rank {rank}: the loss of step[0] is {loss:.9g}, expected {right:.9g}{why}"
                )
        for name, words in (
            ("losses", "the loss of step"),
            ("ups", "up of block"),
            ("downs", "down of block"),
        ):
            instead = {
                clause: partial(lambda run, name: run()[name], run, name)
                for clause, run in wrongly.items()
            }
            expect_close(rank, words, result[name], expected[name], instead=instead)
        if result["left"]:
            raise Wrong(
                f"rank {rank}: blocks require gradients after the step, and did not before it"
            )
    activation, depth, groups = first["x"].size, len(first["ups"]), groups_of([dp, tp])
    places = {
        "dp": (dp, [(first["ups"].size + first["downs"].size) // tp, 1]),
        "tp": (tp, [activation] * (2 * depth - 1)),
    }
    for rank, (axis, (ranks, buffers)) in product(range(dp * tp), places.items()):
        most, more = (
            2 * sum(8 * n * (ranks - 1 if ranks < 3 else 2) for n in each)
            for each in (buffers, [activation])
        )
        found = sum(note.bytes for note in sent_by(rank, notes) if note.to in groups[axis][rank])
        if found > most:
            why = known(
                {"the first block's input needs a gradient, too": most + more}, found.__eq__
            ) * (axis == "tp")
            raise Wrong(
                f"rank {rank} sent {found} bytes along {axis} in two steps, expected no more than "
                f"{most}{why}"
            )
