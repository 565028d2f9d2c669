"""Lesson 14: the judges of what the checks' programs found, in the grader's process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
            instead = {FIRST: [*map(int, np.unravel_index(rank, sizes, order="F"))]}
            says = f"coordinates({asked}) are {named(found)}, expected {named(place)}"
            raise Wrong(says + known(instead, found.__eq__))
        for number, (axis, groups) in enumerate(groups_of(sizes).items()):
            alike = [other for other in range(prod(sizes)) if np.unravel_index(other, sizes)[number] == place[number]]
            instead = {FIRST: groups_of(sizes, "F")[axis][rank], "those are meant that agree along the axis": alike}
            if (found := result[f"group {axis}"].tolist()) != groups[rank]:
                says = f"group({axis!r}, {asked}) is {found}, expected {groups[rank]}"
                raise Wrong(says + known(instead, found.__eq__))
            if (found := result[f"communicator {axis}"].tolist()) != groups[rank]:
                instead["several groups have the same color"] = found if {*found} > {*groups[rank]} else []
                says = f"rank {rank}: the communicator along {axis} has {found}, expected {groups[rank]}"
                raise Wrong(says + known(instead, found.__eq__))
    splits = sum(note.kind == "split" for note in notes)
    if splits > len(results) * len(sizes):
        raise Wrong(f"{splits} splits for {len(results) * len(sizes)} communicators: each calls comm.split once")
    if sent := [note for note in notes if note.kind == "send" and note.line]:
        raise Wrong(f"rank {sent[0].rank} sent a message to make a communicator ({sent[0].line}), expected none")


def bytes_along(dp: int, pp: int, tp: int, stage: int, model: Sequence[int]) -> dict[str, Any]:
    """Return the bytes of task 2, from the number of places where something is sent."""
    layers, hidden, intermediate, tokens, microbatches, itemsize = model
    activation = tokens * hidden * itemsize
    held = ((4 * hidden**2 + 3 * hidden * intermediate) // tp + 2 * hidden) * (layers // pp)
    crossings, places = microbatches * ((stage + 1 < pp) + (stage > 0)), microbatches * 4 * (layers // pp)
    along_tp = places * 2 * (tp - 1) * activation // tp
    return {"dp": 2 * (dp - 1) * held * itemsize // dp, "pp": crossings * activation, "tp": along_tp}


def miscounted(dp: int, pp: int, tp: int, stage: int, model: Sequence[int]) -> dict[str, dict[str, int]]:
    """Return what known mistakes give along each axis."""
    layers, hidden, intermediate, tokens, microbatches, itemsize = model
    right, activation = bytes_along(dp, pp, tp, stage, model), tokens * hidden * itemsize
    matrices, mine, ring = 4 * hidden**2 + 3 * hidden * intermediate, layers // pp, 2 * (dp - 1) * itemsize
    return {
        "dp": {
            "gradients are reduced in every microbatch": right["dp"] * microbatches,
            "the norms are cut along tp": ring * mine * (matrices + 2 * hidden) // tp // dp,
            "the norms are forgotten": ring * mine * (matrices // tp) // dp,
            "tp does not cut the matrices": ring * mine * (matrices + 2 * hidden) // dp,
            "every rank holds the whole model": ring * layers * (matrices + 2 * hidden) // dp,
            "an all-reduce sends the buffer (P - 1)/P times": right["dp"] // 2,
        },
        "pp": {
            "every stage sends both ways": 2 * microbatches * activation * (pp > 1),
            "every stage sends one way": microbatches * activation * (pp > 1),
            "one microbatch crosses in a step": right["pp"] // microbatches,
        },
        "tp": {
            "there are two places a layer, not four": right["tp"] // 2,
            "every rank has all layers": right["tp"] * pp,
            "there is one microbatch": right["tp"] // microbatches,
        },
    }


def judge_counted(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each axis of each stage."""
    sizes, model = case.given[0]["sizes"].tolist(), case.given[0]["model"].tolist()
    for stage, answer in enumerate(results[0]["bytes"].tolist()):
        for (axis, expected), found in zip(bytes_along(*sizes, stage, model).items(), answer, strict=True):
            if found != expected:
                asked = f"bytes_per_step({named(sizes)}, {stage}, **{dict(zip(SIZES, model, strict=True))})"
                why = known(miscounted(*sizes, stage, model)[axis], found.__eq__)
                raise Wrong(f"{asked} says {found} along {axis}, expected {expected}{why}")


TRAINED = {
    "own loss": "a rank returns the loss of its own rows",
    "after": "the loss is that after the step",
    "own mean": "gradients of the ranks' own means are added along dp, not averaged",
    "along tp": "gradients are averaged along tp as well, where they belong to other columns",
    "not entered": "nothing is summed in backward where the region is entered",
    "no step": "the values stay as they are",
}


def two_steps(given: Sequence[Arrays], rank: int, how: str = "") -> dict[str, Array]:
    """Return the losses, and this rank's slices after two steps of the serial model; `how` is one of `TRAINED`."""
    dp, tp = map(int, given[0]["sizes"])
    x, targets = (torch.tensor(np.concatenate([each[name] for each in given[::tp]])) for name in ("x", "targets"))
    ups, downs, losses = given[0]["ups"].copy(), given[0]["downs"].copy(), []
    columns = np.split(np.arange(ups.shape[2]), tp)
    rate = given[0]["rate"] * {"own mean": dp, "no step": 0}.get(how, 1)
    for _ in range(3):
        errors, gradients = backward(x, targets, ups, downs, columns if how == "not entered" else [columns])
        losses.append(float((np.split(errors, dp)[rank // tp] if how == "own loss" else errors).mean()))
        if len(losses) < 3:
            for values, gradient, axis in ((ups, gradients[0], 2), (downs, gradients[1], 1)):
                if how == "along tp":
                    gradient = np.concatenate([np.mean(np.split(gradient, tp, axis), axis=0)] * tp, axis)
                values -= rate * gradient
    mine = columns[rank % tp]
    return {"losses": np.array(losses[how == "after" :][:2]), "ups": ups[:, :, mine], "downs": downs[:, mine]}


def backward(x: torch.Tensor, targets: torch.Tensor, ups: Array, downs: Array, shares: Sequence[Any]) -> Any:
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
            whole, own = torch.relu(y @ up) @ down, torch.relu(y @ up[:, mine]) @ down[mine]
            y = own + (whole - own).detach()
        errors = (y - targets).square()
        errors.mean().backward()
        found[0][:, :, mine] = parameters[0].grad.numpy()[:, :, mine]
        found[1][:, mine] = parameters[1].grad.numpy()[:, mine]
    return errors.detach().numpy(), found


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
        expect_close(rank, "the norm", result["norm"], np.array(norm), instead=instead | own)
        expected, found = scale * given["values"], result["values"]
        kept = np.where(found == given["values"], found, expected)
        some = {"some of a rank's gradients are scaled, and others are left as they were": kept}
        some = {} if np.array_equal(found, given["values"]) else some
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
}


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
        others = {clause: all_that_fit(case.given[0], how).keys() for how, clause in FITTING.items()}
        what = f"is missing, but fits: with m = {sequences / dp:g}, min(pp, m) microbatches are under way"
        says = f"the layout (dp, pp, tp) = {layout} {what if layout in expected else why}"
        raise Wrong(says + known(others, found.keys().__eq__))
    for layout, seconds in expected.items():
        if not abs(found[layout] - seconds) <= 1e-6 * seconds:
            says = f"a step of (dp, pp, tp) = {layout} takes {found[layout]:.6g} s, expected {seconds:.6g} s"
            wrongly = {clause: all_that_fit(case.given[0], how)[layout] for how, clause in SLIPS.items()}
            raise Wrong(says + known(wrongly, lambda value: abs(value - found[layout]) <= 1e-6 * seconds))  # noqa: B023


FITTING = {
    "below": "a layout that needs just as much memory as there is does not fit",
    "pp microbatches": "pp microbatches are under way also where there are fewer",
    "m microbatches": "all m microbatches are under way",
    "one microbatch": "one microbatch is under way",
}
SLIPS = {
    "rank 0": "the link is that of rank 0's group alone",
    "first stage": "the bytes are those of the first stage",
    "stretches all": "the bubble stretches pp and dp as well",
    "across": "all links are taken for those across nodes",
    "inside": "all links are taken for those inside a node",
    "no bubble": "there is no bubble",
}


def all_that_fit(given: Arrays, how: str = "") -> dict[tuple[int, int, int], float]:
    """Return the seconds of a step of every layout that fits; `how` is one of `SLIPS` or `FITTING`."""
    layers, hidden, intermediate, heads, sequence, sequences = given["model"].tolist()
    (inside, across, memory, flops), (ranks, per_node) = given["machine"].tolist(), given["ranks"].tolist()
    matrices, found = layers * (4 * hidden**2 + 3 * hidden * intermediate), {}
    compute = 6 * matrices * sequence * sequences / (ranks * flops)
    for dp, pp, tp in product(range(1, ranks + 1), repeat=3):
        if dp * pp * tp != ranks or layers % pp or heads % tp or sequences % dp:
            continue
        m = sequences // dp
        under_way = {"pp microbatches": pp, "m microbatches": m, "one microbatch": 1}.get(how, min(pp, m))
        held = 16 * matrices / (pp * tp) + under_way * (layers // pp) * 34 * sequence * hidden / tp
        if held > memory or (held == memory and how == "below"):
            continue
        model = (layers, hidden, intermediate, sequence, m, 2)
        seconds = bytes_along(dp, pp, tp, 1 if pp > 2 and how != "first stage" else 0, model)
        for axis, groups in groups_of([dp, pp, tp]).items():
            several = groups[:1] if how == "rank 0" else groups
            near = all(group[0] // per_node == group[-1] // per_node for group in several)
            near = how == "inside" or (near and how != "across")
            seconds[axis] /= inside if near else across
        stretch, rest = 1.0 if how == "no bubble" else (m + pp - 1) / m, seconds["pp"] + seconds["dp"]
        rest *= stretch if how == "stretches all" else 1.0
        found[dp, pp, tp] = (compute + seconds["tp"]) * stretch + rest
    return found
