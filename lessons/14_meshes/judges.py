"""Lesson 14: the judges of what the checks' programs found, in the grader's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch

from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong, expect_close, known, sent_by

AXES = {2: ("dp", "tp"), 3: ("dp", "pp", "tp"), 4: ("dp", "pp", "cp", "tp")}
SIZES = ("layers", "hidden", "intermediate", "tokens", "microbatches", "itemsize")
KINDS = tuple(product((True, False), repeat=2))  # cut, tied


def named(sizes: Sequence[int]) -> dict[str, int]:
    """Return the sizes of the axes by name."""
    return dict(zip(AXES[len(sizes)], map(int, sizes), strict=True))


def squares_of(values: Any, kinds: Sequence[tuple[bool, bool]] = KINDS) -> Any:
    """Return the sum of squares that each rank counts [pp, tp], of `values` [pp, tp, kind, elements]."""
    squares = np.zeros(values.shape[:2])
    for kind, (cut, tied) in enumerate(kinds):
        once = (values[:, :, kind] ** 2).sum(axis=-1)[: 1 if tied else None, : None if cut else 1]
        squares[: len(once), : once.shape[1]] += once
    return squares


def norm_of(values: Any, kinds: Sequence[tuple[bool, bool]] = KINDS) -> float:
    """Return the norm of `values` [pp, tp, kind, elements], with what several ranks hold counted once."""
    return float(squares_of(values, kinds).sum() ** 0.5)


def groups_of(sizes: Sequence[int], order: Any = "C") -> dict[str, list[list[int]]]:
    """Return the group of every rank along every axis; in order F ranks count up along the first axis first."""
    array, found = np.arange(prod(sizes)).reshape(sizes, order=order), {}
    for number, axis in enumerate(named(sizes)):
        rows = sorted(np.moveaxis(array, number, -1).reshape(-1, sizes[number]).tolist())
        found[axis] = [next(row for row in rows if rank in row) for rank in range(array.size)]
    return found


FIRST = "ranks count up along the first axis first"


def judge_placed(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Coordinates are digits, a group is a slice, and a communicator is a group."""
    sizes = case.given[0]["sizes"].tolist()
    for rank, result in enumerate(results):
        asked, place = f"{rank}, {named(sizes)}", [*map(int, np.unravel_index(rank, sizes))]
        if (found := result["place"].tolist()) != place:
            instead = {
                FIRST: [*map(int, np.unravel_index(rank, sizes, order="F"))],
                "they count from 1": [each + 1 for each in place],
                "the remainders are taken of the rank itself, not of what the inner axes leave": [
                    rank % n for n in sizes
                ],
                "the axes are named in the reverse order": place[::-1],
                "quotient and remainder are exchanged": digits(rank, sizes, exchanged=True),
                "the last axis has the quotients": digits(rank, sizes[::-1])[::-1],
            }
            if len(found) != len(sizes):
                raise Wrong(f"coordinates({asked}) has {len(found)} numbers, expected one for each axis")
            says = f"coordinates({asked}) are {dict(zip(named(sizes), found, strict=True))}, expected {named(place)}"
            raise Wrong(says + known(instead, found.__eq__))
        for number, (axis, groups) in enumerate(groups_of(sizes).items()):
            if (found := result[f"group {axis}"].tolist()) != groups[rank]:
                says = f"group({axis!r}, {asked}) is {found}, expected {groups[rank]}"
                raise Wrong(says + known(other_groups(rank, sizes, number), found.__eq__))
            if (found := result[f"communicator {axis}"].tolist()) != groups[rank]:
                says = f"rank {rank}: the communicator along {axis} has {found}, expected {groups[rank]}"
                instead = {f"the color is {clause}": alike(rank, sizes, colors(sizes, number)[clause])
                           for clause in colors(sizes, number)}  # fmt: skip
                instead |= {FIRST: groups_of(sizes, "F")[axis][rank]}
                instead["several groups have the same color"] = found if {*found} > {*groups[rank]} else []
                instead["ranks of one group have different colors"] = found if {*found} < {*groups[rank]} else []
                raise Wrong(says + known(instead, found.__eq__))
    splits = sum(note.kind == "split" for note in notes)
    if splits > len(results) * len(sizes):
        raise Wrong(f"{splits} splits for {len(results) * len(sizes)} communicators: each calls comm.split once")
    if sent := [note for note in notes if note.kind == "send" and note.line]:
        raise Wrong(f"rank {sent[0].rank} sent a message to make a communicator ({sent[0].line}), expected none")


def digits(rank: int, sizes: Sequence[int], exchanged: bool = False) -> list[int]:
    """Return the coordinates of a rank, or what a slip makes of them."""
    places: list[int] = []
    for size in reversed(sizes):
        rank, place = divmod(rank, size)
        rank, place = (place, rank) if exchanged else (rank, place)
        places.insert(0, place)
    return places


def other_groups(rank: int, sizes: Sequence[int], number: int) -> dict[str, list[int]]:
    """Return what known mistakes take for the group of a rank along an axis."""
    size, place = sizes[number], np.unravel_index(rank, sizes)[number]
    right, axis = groups_of(sizes)[[*named(sizes)][number]][rank], [*named(sizes)][number]
    inner, outer, own = prod(sizes[number + 1 :]), prod(sizes[:number]), prod(sizes[number:])

    def steps(stride: int, first: int | None = None) -> list[int]:
        begin = rank - int(place) * stride if first is None else first
        return [begin + stride * each for each in range(size)]

    others = [other for other in range(prod(sizes)) if np.unravel_index(other, sizes)[number] == place]
    differ = [other for other in range(prod(sizes)) if np.unravel_index(other, sizes)[number] != place]
    turned = right.index(rank)
    return {
        "the rank itself is left out": [other for other in right if other != rank],
        "the group begins with the rank itself, and is not in ascending order": right[turned:] + right[:turned],
        "it goes on upwards from the rank itself; its place may be in the middle": steps(inner, rank),
        "it is in descending order": right[::-1],
        "the places along the axis are returned, not the ranks": [*range(size)],
        "the stride is the product of the sizes from this axis on, its own among them": steps(own),
        "the stride is the product of the sizes outside of this axis, not inside": steps(outer),
        "the stride is 1, as along the last axis": steps(1),
        "the stride is the size of this axis": steps(size),
        "the stride is the size of the next axis alone": steps(sizes[(number + 1) % len(sizes)]),
        "the group of rank 0 is returned": groups_of(sizes)[axis][0],
        FIRST: groups_of(sizes, "F")[axis][rank],
        "those are meant that agree along the axis": others,
        "all are meant that differ along the axis, also elsewhere": differ,
    }


def colors(sizes: Sequence[int], number: int) -> dict[str, Callable[[int], int]]:
    """Return what known mistakes pass to `comm.split`, by rank."""
    inner, size = prod(sizes[number + 1 :]), sizes[number]

    def at(rank: int) -> list[int]:
        return [int(each) for each in np.unravel_index(rank, sizes)]

    return {
        "the coordinate on this axis: those who agree there, not those who differ": lambda rank: at(rank)[number],
        "the sum of the other coordinates: different ones add up to the same": lambda rank: (
            sum(at(rank)) - at(rank)[number]
        ),
        "the product of the other coordinates: 0 of all that have a 0": lambda rank: prod(
            each for axis, each in enumerate(at(rank)) if axis != number
        ),
        "the rank: each has one of its own": lambda rank: rank,
        "the rank divided by the size of the axis, as if its groups were neighbours": lambda rank: rank // size,
        "the rank modulo the size of the axis": lambda rank: rank % size,
        "the rank modulo the stride, which leaves out the axes outside": lambda rank: rank % inner,
        "the rank divided by the stride": lambda rank: rank // inner,
        "the first coordinate": lambda rank: at(rank)[0],
        "the last coordinate": lambda rank: at(rank)[-1],
        "the same for all": lambda rank: 0,
    }


def alike(rank: int, sizes: Sequence[int], color: Callable[[int], int]) -> list[int]:
    """Return the ranks that have the same color as this one."""
    return [other for other in range(prod(sizes)) if color(other) == color(rank)]


def bytes_along(dp: int, pp: int, tp: int, stage: int, model: Sequence[int]) -> dict[str, Any]:
    """Return the bytes of task 2, from the number of places where something is sent."""
    layers, hidden, intermediate, tokens, microbatches, itemsize = model
    activation = tokens * hidden * itemsize
    held = ((4 * hidden**2 + 3 * hidden * intermediate) // tp + 2 * hidden) * (layers // pp)
    crossings, places = microbatches * ((stage + 1 < pp) + (stage > 0)), microbatches * 4 * (layers // pp)
    along_tp = places * 2 * (tp - 1) * activation // tp
    return {"dp": 2 * (dp - 1) * held * itemsize // dp, "pp": crossings * activation, "tp": along_tp}


def miscounted(dp: int, pp: int, tp: int, stage: int, model: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return what known mistakes give along each axis."""
    layers, hidden, intermediate, tokens, microbatches, itemsize = model
    right, activation = bytes_along(dp, pp, tp, stage, model), tokens * hidden * itemsize
    matrices, mine, ring = 4 * hidden**2 + 3 * hidden * intermediate, layers // pp, 2 * (dp - 1) * itemsize
    buffer, places = ((matrices // tp) + 2 * hidden) * mine * itemsize, 4 * mine * microbatches * activation

    def reduced(matrices: int, norms: int = 2 * hidden) -> float:
        return ring * mine * (matrices / tp + norms) / dp

    both, ways = microbatches * activation * (pp > 1), (stage + 1 < pp) + (stage > 0)
    several = {
        "{} is in elements, not in bytes": 1 / itemsize,
        "{} is divided by tp once more": 1 / tp,
        "{} is divided by dp once more": 1 / dp,
        "{} is divided by pp once more": 1 / pp,
        "{} is that of all tp ranks": tp,
        "{} is that of all dp ranks": dp,
        "{} is that of all stages: a rank has layers / pp of the layers": pp,
        "{} counts once for each of the microbatches": microbatches,
        "{} is that of one microbatch": 1 / microbatches,
        "{} counts once for each layer of the stage": mine,
        "{} is that of one layer": 1 / mine,
        "an activation has tokens x F elements; it has tokens x D": intermediate / hidden,
        "{} counts itemsize twice": itemsize,
    }
    what = {"dp": "the buffer of gradients", "pp": "what is sent", "tp": "what is sent"}
    found: dict[str, dict[str, float]] = {
        "dp": {
            "an all-reduce sends the buffer twice; a ring sends it 2 (P - 1)/P times": 2 * buffer * (dp > 1),
            "an all-reduce sends the buffer once; a ring sends it 2 (P - 1)/P times": buffer * (dp > 1),
            "an all-reduce sends the buffer (P - 1)/P times": right["dp"] / 2,
            "each of the 2 (P - 1) steps sends the whole buffer; it is 1/P of it": 2 * (dp - 1) * buffer,
            "each of P - 1 steps sends the whole buffer": (dp - 1) * buffer,
            "the ring has tp ranks; it has dp": 2 * (tp - 1) * buffer / tp,
            "gradients are reduced in every microbatch": right["dp"] * microbatches,
            "the norms are cut along tp": reduced(matrices, 2 * hidden // tp) if tp > 1 else -1,
            "the norms are forgotten": reduced(matrices, 0),
            "there is one norm in a layer; there are two": reduced(matrices, hidden),
            "tp does not cut the matrices": reduced(matrices * tp),
            "every rank holds the whole model": ring * layers * (matrices + 2 * hidden) / dp,
            "the MLP has two matrices; it has three": reduced(matrices - hidden * intermediate),
            "attention has three matrices; it has four": reduced(matrices - hidden**2),
            "attention is left out": reduced(matrices - 4 * hidden**2),
            "the MLP is left out": reduced(4 * hidden**2),
            "the MLP's matrices are D x D": reduced(7 * hidden**2),
            "each matrix of the MLP is cut, and those of attention are not": reduced(
                matrices + 4 * hidden**2 * (tp - 1)
            ),
        },
        "pp": {
            "every stage sends both ways": 2 * both,
            "every stage sends one way": both,
            "the last stage sends to the first, too: stages are no ring": (ways + (stage == pp - 1)) * both,
            "only activations are sent, and no gradients": both * (stage + 1 < pp),
            "only gradients are sent, and no activations": both * (stage > 0),
            "activation and gradient both go to the next stage, if there is one": 2 * both * (stage + 1 < pp),
            "activation and gradient both go to the stage before, if there is one": 2 * both * (stage > 0),
            "what is received counts as well": 2 * right["pp"],
            "one microbatch crosses in a step": right["pp"] / microbatches,
            "it is that of all stages together": 2 * (pp - 1) * microbatches * activation,
        },
        "tp": {
            "there are two places a layer, not four, or an all-reduce sends the buffer (P - 1)/P times": right["tp"]
            / 2,
            "there is one place a layer, not four": right["tp"] / 4,
            "there are three places a layer, not four": right["tp"] * 3 / 4,
            "there are six places a layer, not four": right["tp"] * 3 / 2,
            "there are eight places a layer, not four": right["tp"] * 2,
            "an all-reduce sends the buffer twice; a ring sends it 2 (P - 1)/P times": 2 * places * (tp > 1),
            "an all-reduce sends the buffer once; a ring sends it 2 (P - 1)/P times": places * (tp > 1),
            "each of the 2 (P - 1) steps sends the whole buffer; it is 1/P of it": 2 * (tp - 1) * places,
            "the ring has dp ranks; it has tp": 2 * (dp - 1) * places / dp,
            "every rank has all layers": right["tp"] * pp,
            "there is one microbatch": right["tp"] / microbatches,
        },
    }
    for axis, ways_to_fail in found.items():
        ways_to_fail |= {
            clause.format(what[axis]): right[axis] * factor for clause, factor in several.items() if factor != 1
        }
    return found


def either(instead: Mapping[str, float], same: Callable[[float], bool]) -> str:
    """Return which mistakes give the same, the first two of them: where sizes are small, several may."""
    fitting = [clause for clause, value in instead.items() if same(value)]
    return known({", or if ".join(fitting[:2]): bool(fitting)}, bool)


def judge_counted(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each axis of each stage."""
    sizes, model = case.given[0]["sizes"].tolist(), case.given[0]["model"].tolist()
    for stage, answer in enumerate(results[0]["bytes"].tolist()):
        for (axis, expected), found in zip(bytes_along(*sizes, stage, model).items(), answer, strict=True):
            if found != expected:
                asked = f"bytes_per_step({named(sizes)}, {stage}, **{dict(zip(SIZES, model, strict=True))})"
                why = either(miscounted(*sizes, stage, model)[axis], lambda value: abs(value - found) < 1)  # noqa: B023
                raise Wrong(f"{asked} says {found} along {axis}, expected {expected}{why}")


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
    "own gradient": "gradients are not reduced along dp",
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
RATES = {"own mean": lambda dp, rate: dp, "averaged twice": lambda dp, rate: 1 / dp, "uphill": lambda dp, rate: -1}
RATES |= {"no step": lambda dp, rate: 0, "twice": lambda dp, rate: 2, "no rate": lambda dp, rate: 1 / rate}
RATES |= {"half": lambda dp, rate: 1 / 2, "sum over dp": lambda dp, rate: dp}


def two_steps(given: Sequence[Arrays], rank: int, how: str = "") -> dict[str, Array]:
    """Return the losses, and this rank's slices after two steps of the serial model; `how` is one of `TRAINED`."""
    dp, tp = map(int, given[0]["sizes"])
    x, targets = (torch.tensor(np.concatenate([each[name] for each in given[::tp]])) for name in ("x", "targets"))
    ups, downs, losses = given[0]["ups"].copy(), given[0]["downs"].copy(), []
    columns = np.split(np.arange(ups.shape[2]), tp)
    rate = given[0]["rate"] * RATES.get(how, lambda dp, rate: 1)(dp, float(given[0]["rate"]))
    of_loss = {"sum over dp": dp, "sum over tp": tp, "by tp": 1 / tp, "half": 1 / 2, "rows": x.shape[1]}
    of_loss |= {"total": x.numel()}
    rate *= of_loss.get(how, 1) if how in ("by tp", "rows", "total") else 1
    rows = slice(len(x) // dp * (rank // tp), len(x) // dp * (rank // tp + 1))
    steps = {"up alone": (1, 0), "down alone": (0, 1)}.get(how, (1, 1))
    which = np.arange(len(ups))
    which = {"first alone": which == 0, "last alone": which == len(ups) - 1}.get(how, which >= 0)[:, None, None]
    for _ in range(3):
        shares = columns if how == "not entered" else [columns]
        errors, gradients = backward(x, targets, ups, downs, shares, how)
        if how == "own gradient":
            gradients = backward(x[rows], targets[rows], ups, downs, [columns])[1]
        losses.append(float((np.split(errors, dp)[rank // tp] if how == "own loss" else errors).mean()))
        losses[-1] *= of_loss.get(how, 1)
        if len(losses) < 3:
            for values, gradient, axis, moves in ((ups, gradients[0], 2, steps[0]), (downs, gradients[1], 1, steps[1])):
                if how in ("along tp", "summed along tp"):
                    gradient = np.concatenate([np.mean(np.split(gradient, tp, axis), axis=0)] * tp, axis)
                    gradient = gradient * (tp if how == "summed along tp" else 1)
                values -= rate * gradient * moves * which
    mine = columns[rank % tp]
    return {"losses": np.array(losses[how == "after" :][:2]), "ups": ups[:, :, mine], "downs": downs[:, mine]}


def backward(
    x: torch.Tensor, targets: torch.Tensor, ups: Array, downs: Array, shares: Sequence[Any], how: str = ""
) -> Any:
    """Return the squared errors, and the gradients of their mean, as those see it who each compute a share of columns.

    Each has the gradient of its own columns, which passes through its own columns of the blocks behind alone.
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
        wrongly = {clause: partial(two_steps, case.given, rank, how) for how, clause in TRAINED.items()}
        for name, words in (("losses", "the loss of step"), ("ups", "up of block"), ("downs", "down of block")):
            instead = {clause: lambda run=run, name=name: run()[name] for clause, run in wrongly.items()}
            expect_close(rank, words, result[name], expected[name], instead=instead)
        if result["left"]:
            raise Wrong(f"rank {rank}: blocks require gradients after the step, and did not before it")
    activation, depth, groups = first["x"].size, len(first["ups"]), groups_of([dp, tp])
    places = {
        "dp": (dp, [(first["ups"].size + first["downs"].size) // tp, 1]),
        "tp": (tp, [activation] * (2 * depth - 1)),
    }
    for rank, (axis, (ranks, buffers)) in product(range(dp * tp), places.items()):
        most, more = (
            2 * sum(8 * n * (ranks - 1 if ranks < 3 else 2) for n in each) for each in (buffers, [activation])
        )
        found = sum(note.bytes for note in sent_by(rank, notes) if note.to in groups[axis][rank])
        if found > most:
            why = known({"the first block's input needs a gradient, too": most + more}, found.__eq__) * (axis == "tp")
            raise Wrong(f"rank {rank} sent {found} bytes along {axis} in two steps, expected no more than {most}{why}")


def judge_clipped(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The norm of what the serial model has, on every rank, for one number along each axis."""
    (_, pp, tp), limit = map(int, case.given[0]["sizes"]), float(case.given[0]["limit"])
    values = np.stack([given["values"] for given in case.given])
    values = values.reshape(pp, tp, *values.shape[1:])
    norm, instead = norm_of(values), {clause: np.array(wrong(values)) for clause, wrong in NORMS.items()}
    scale = limit / (norm + 1e-6) if norm > limit else 1.0
    for rank, (given, result) in enumerate(zip(case.given, results, strict=True)):
        own = {"it is that of what this rank has": np.linalg.norm(given["values"])}
        own["it is that after scaling"] = np.array(min(norm, limit))
        expect_close(rank, "the norm", result["norm"], np.array(norm), instead=instead | own)
        expected, found = scale * given["values"], result["values"]
        kept = np.where(found == given["values"], found, expected)
        some = {"some of a rank's gradients are scaled, and others are left as they were": kept}
        some = {} if np.array_equal(found, given["values"]) else some
        factors = {
            "they are multiplied by the limit, not by limit/norm": limit,
            "they are divided by the norm, and not multiplied by the limit": 1 / norm,
            "they are multiplied by norm/limit": norm / limit,
            "they are scaled to the limit although their norm is smaller": limit / norm if norm < limit else 0.0,
            "the factor is that of squares, limit/norm²": limit / norm**2,
            "they are scaled twice": scale**2,
            "the factor goes by the norm of what this rank has": limit / np.linalg.norm(given["values"]),
            "1e-6 is not added to the norm": limit / norm if norm > limit else 1.0,
        }
        some |= {clause: factor * given["values"] for clause, factor in factors.items() if factor}
        expect_close(rank, "the array given, of kind", found, expected, instead=some, before=given["values"])
        sent, most = sum(note.bytes for note in notes if note.rank == rank), 8 * (pp + tp - 2)
        if sent > most:
            raise Wrong(f"rank {rank} sent {sent} bytes, expected no more than {most}: one number for all gradients")


NORMS: dict[str, Callable[[Any], float]] = {
    "what several ranks have is counted by each of them": lambda values: norm_of(values, [(True, False)] * 4),
    "what all of tp have is counted by each of them": lambda values: norm_of(
        values, [(True, tied) for _, tied in KINDS]
    ),
    "what all of pp have is counted by each of them": lambda values: norm_of(
        values, [(cut, False) for cut, _ in KINDS]
    ),
    "what is cut along tp is counted by one rank": lambda values: norm_of(values, [(False, tied) for _, tied in KINDS]),
    "what is tied is counted by one, though cut": lambda values: norm_of(values, [(c and not t, t) for c, t in KINDS]),
    "the ranks' norms are added, not their squares": lambda values: float((squares_of(values) ** 0.5).sum()),
    "the root is not taken": lambda values: norm_of(values) ** 2,
    "what is not cut counts on each tp rank, and what is cut on one: it is the other way round": lambda values: norm_of(
        values, [(not cut, tied) for cut, tied in KINDS]
    ),
    "what is tied counts on each stage, and the rest on one: it is the other way round": lambda values: norm_of(
        values, [(cut, not tied) for cut, tied in KINDS]
    ),
    "only the first stage counts: nothing is added up along pp": lambda values: norm_of(values[:1]),
    "only the first tp rank counts: nothing is added up along tp": lambda values: norm_of(values[:, :1]),
    "what is tied is left out": lambda values: norm_of(
        values[:, :, [k for k, (_, tied) in enumerate(KINDS) if not tied]], [kind for kind in KINDS if not kind[1]]
    ),  # fmt: skip
    "what is not cut is left out": lambda values: norm_of(
        values[:, :, [k for k, (cut, _) in enumerate(KINDS) if cut]], [kind for kind in KINDS if kind[0]]
    ),  # fmt: skip
    "magnitudes are added, not squares": lambda values: float(squares_of(np.abs(values) ** 0.5).sum()),
    "the root of the sum of magnitudes is taken": lambda values: float(squares_of(np.abs(values) ** 0.5).sum() ** 0.5),
    "the largest square is taken, not their sum": lambda values: largest_of(values),
    "squares are averaged over the ranks, not added": lambda values: norm_of(values) / values[:, :, 0, 0].size ** 0.5,
}


def largest_of(values: Any) -> float:
    """Return the norm of the gradient with the largest norm."""
    return float(np.linalg.norm(values, axis=-1).max())


def judge_chosen(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """All layouts that fit and no others, each with its seconds."""
    expected = all_that_fit(case.given[0])
    found = {tuple(map(int, row[:3])): float(row[3]) for row in results[0]["layouts"].reshape(-1, 4)}
    for layout in sorted(expected.keys() ^ found.keys()):
        (dp, pp, tp), (ranks, _) = layout, case.given[0]["ranks"].tolist()
        layers, _, _, heads, _, sequences = case.given[0]["model"].tolist()
        parts = {"pp": (pp, layers, "layers"), "tp": (tp, heads, "heads"), "dp": (dp, sequences, "sequences")}
        bad = [f"{axis} = {part} does not divide {n} {name}" for axis, (part, n, name) in parts.items() if n % part]
        bad += [f"these are {dp * pp * tp} ranks, not {ranks}"] * (dp * pp * tp != ranks)
        why = f"is not possible: {bad[0]}" if bad else "needs more than the memory"
        others = {clause: all_that_fit(case.given[0], how).keys() == found.keys() for how, clause in FITTING.items()}
        what = f"is missing, but fits: with m = {sequences / dp:g}, min(pp, m) microbatches are under way"
        says = f"the layout (dp, pp, tp) = {layout} {what if layout in expected else why}"
        raise Wrong(says + either(others, bool))
    for layout, seconds in expected.items():
        if not abs(found[layout] - seconds) <= 1e-6 * seconds:
            says = f"a step of (dp, pp, tp) = {layout} takes {found[layout]:.6g} s, expected {seconds:.6g} s"
            wrongly = {clause: alike_in_all(found, all_that_fit(case.given[0], how)) for how, clause in SLIPS.items()}
            raise Wrong(says + either(wrongly, bool))


def alike_in_all(found: Mapping[Any, float], other: Mapping[Any, float]) -> bool:
    """Tell whether all layouts take the same seconds."""
    return all(abs(found[layout] - seconds) <= 1e-6 * seconds for layout, seconds in other.items())


FITTING = {
    "below": "a layout that needs just as much memory as there is does not fit",
    "pp microbatches": "pp microbatches are under way also where there are fewer",
    "m microbatches": "all m microbatches are under way",
    "one microbatch": "one microbatch is under way",
    "most": "the larger of pp and m is under way, not the smaller",
    "states without tp": "parameters, gradients and states are not divided by tp",
    "states without pp": "parameters, gradients and states are not divided by pp",
    "states by all": "parameters, gradients and states are divided by dp, too",
    "states whole": "each GPU holds parameters, gradients and states of the whole model",
    "weights alone": "parameters have 2 bytes, and gradients and states are left out; all take 16",
    "activations without tp": "activations are not divided by tp",
    "activations of all layers": "a GPU holds activations of all layers, not of layers / pp",
    "no activations": "activations are left out",
    "everything fits": "memory is not asked",
    "any layers": "pp need not divide the layers",
    "any heads": "tp need not divide the heads",
    "any sequences": "dp need not divide the sequences",
    "fewer ranks": "fewer ranks than there are will do",
    "no bubble layouts": "layouts with more stages than microbatches are left out; they are possible",
    "tp in a node": "tp has to lie within a node; that is not asked here",
    "reversed": "keys are (tp, pp, dp), not (dp, pp, tp)",
}
SLIPS = {
    "rank 0": "the link is that of rank 0's group alone",
    "first stage": "the bytes are those of the first stage",
    "last stage": "the bytes are those of the last stage, or of the first",
    "all stages": "the bytes are those of all stages together",
    "stretches all": "the bubble stretches pp and dp as well",
    "stretches compute": "the bubble stretches compute alone; tp waits in it, too",
    "across": "all links are taken for those across nodes",
    "inside": "all links are taken for those inside a node",
    "by size": "an axis no longer than a node is taken to lie inside, whatever lies between its ranks",
    "no bubble": "there is no bubble",
    "pp of m": "the bubble is pp/m; it is (pp - 1)/m",
    "of the step": "the bubble is (pp - 1)/(m + pp - 1), its share of the whole step; it is (pp - 1)/m of the rest",
    "all sequences are microbatches": "m is the number of sequences: they are divided by dp first",
    "m is dp": "m is taken for dp",
    "2 N": "2 N operations a token count, the forward alone; with backward it is 6",
    "4 N": "4 N operations a token count, the backward alone; with forward it is 6",
    "8 N": "8 N operations a token count, with recomputing; it is 6",
    "one GPU": "one GPU computes everything: compute is not divided by the ranks",
    "one sequence": "compute is that of one sequence, not of the batch",
    "ranks less dp": "compute is not divided by dp",
    "ranks less pp": "compute is not divided by pp",
    "ranks less tp": "compute is not divided by tp",
    "no dp": "the seconds along dp are left out",
    "no pp": "the seconds along pp are left out",
    "no tp": "the seconds along tp are left out",
    "itemsize 4": "an element has 4 bytes, not 2",
    "itemsize 1": "an element has 1 byte, not 2",
    "tokens of a batch": "a microbatch has the tokens of all sequences; it has one sequence",
    "one microbatch sent": "the bytes are those of one microbatch, not of m",
    "slowest alone": "only the slowest axis counts; they add up",
}


def all_that_fit(given: Arrays, how: str = "") -> dict[tuple[int, int, int], float]:
    """Return the seconds of a step of every layout that fits; `how` is one of `SLIPS` or `FITTING`."""
    layers, hidden, intermediate, heads, sequence, sequences = given["model"].tolist()
    (inside, across, memory, flops), (ranks, per_node) = given["machine"].tolist(), given["ranks"].tolist()
    matrices, found = layers * (4 * hidden**2 + 3 * hidden * intermediate), {}
    compute = {"2 N": 2, "4 N": 4, "8 N": 8}.get(how, 6) * matrices * sequence * sequences / (ranks * flops)
    compute *= {"one GPU": ranks, "one sequence": 1 / sequences}.get(how, 1)
    for dp, pp, tp in product(range(1, ranks + 1), repeat=3):
        if ranks % (dp * pp * tp) if how == "fewer ranks" else dp * pp * tp != ranks:
            continue
        bad = {"any layers": layers % pp, "any heads": heads % tp, "any sequences": sequences % dp}
        if any(each for rule, each in bad.items() if rule != how) or sequences < dp:
            continue
        if (how == "no bubble layouts" and pp > sequences // dp) or (how == "tp in a node" and tp > per_node):
            continue
        m = sequences // dp
        if not fitting(how, matrices, layers, sequence * hidden, (dp, pp, tp, m), memory):
            continue
        m = {"all sequences are microbatches": sequences, "m is dp": dp}.get(how, m)
        stages = {"first stage": [0], "last stage": [pp - 1], "all stages": range(pp)}
        stages["stage"] = [1 if pp > 2 else 0]
        model = (layers, hidden, intermediate, sequence * (sequences if how == "tokens of a batch" else 1),
                 1 if how == "one microbatch sent" else m, {"itemsize 4": 4, "itemsize 1": 1}.get(how, 2))  # fmt: skip
        sent = [bytes_along(dp, pp, tp, stage, model) for stage in stages.get(how, stages["stage"])]
        seconds = {axis: sum(each[axis] for each in sent) for axis in ("dp", "pp", "tp")}
        for axis, groups in groups_of([dp, pp, tp]).items():
            several = groups[:1] if how == "rank 0" else groups
            near = all(group[0] // per_node == group[-1] // per_node for group in several)
            near = len(groups[0]) <= per_node if how == "by size" else near
            near = how == "inside" or (near and how != "across")
            seconds[axis] *= 0 if how == f"no {axis}" else 1
            seconds[axis] /= inside if near else across
        stretch = {"no bubble": 1.0, "pp of m": (m + pp) / m, "of the step": 1 + (pp - 1) / (m + pp - 1)}.get(
            how, (m + pp - 1) / m
        )
        busy = compute * {"ranks less dp": dp, "ranks less pp": pp, "ranks less tp": tp}.get(how, 1)
        rest = (seconds["pp"] + seconds["dp"]) * (stretch if how == "stretches all" else 1.0)
        whole = (busy + seconds["tp"]) * stretch + rest
        whole = busy * stretch + seconds["tp"] + rest if how == "stretches compute" else whole
        whole = busy * stretch + max(seconds.values()) if how == "slowest alone" else whole
        found[(tp, pp, dp) if how == "reversed" else (dp, pp, tp)] = whole
    return found


def fitting(
    how: str, matrices: int, layers: int, activation: int, layout: tuple[int, int, int, int], memory: float
) -> bool:
    """Tell whether a layout fits; `how` is one of `FITTING`."""
    dp, pp, tp, m = layout
    under_way = {"pp microbatches": pp, "m microbatches": m, "one microbatch": 1, "most": max(pp, m)}
    parts = {"states without tp": pp, "states without pp": tp, "states by all": dp * pp * tp, "states whole": 1}
    held = (2 if how == "weights alone" else 16) * matrices / parts.get(how, pp * tp)
    kept = under_way.get(how, min(pp, m)) * (layers / (1 if how == "activations of all layers" else pp))
    kept *= 34 * activation / (1 if how == "activations without tp" else tp)
    held += 0 if how == "no activations" else kept
    return how == "everything fits" or (held < memory if how == "below" else held <= memory)
