"""Lesson 14: what is checked, and for how many points. Along which axis a message went shows from its two ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from minidist import Cluster, Communicator, Layout, Mesh
from minidist.collectives import all_gather
from minidist.comm.threads_wire.cluster import Link
from minidist.course.grader.contract import Arrays, Case, Check, Draw, Note, Task, Wrong, expect_close, sent_by

BY_HAND = ("minidist.mesh",)
STRATEGIES = tuple(f"minidist.parallel.{name}" for name in ("parallelize", "data", "sharded", "tensor.plan", "clip"))
GROUPS = Task(1, "coordinates and groups", BY_HAND, may_use=("comm.split",))
BYTES = Task(2, "bytes along each axis", BY_HAND)
STEP = Task(3, "a step on two axes", BY_HAND + STRATEGIES)
NORM = Task(4, "one norm for the mesh", BY_HAND + STRATEGIES)
CHOICE = Task(5, "which layout", BY_HAND)

AXES = {2: ("dp", "tp"), 3: ("dp", "pp", "tp"), 4: ("dp", "pp", "cp", "tp")}
SIZES = ("layers", "hidden", "intermediate", "tokens", "microbatches", "itemsize")
KINDS = tuple(product((True, False), repeat=2))  # cut, tied
MODEL = ("layers", "hidden", "intermediate", "heads", "sequence", "sequences")


def named(sizes: Sequence[int]) -> dict[str, int]:
    """Return the sizes of the axes by name."""
    return dict(zip(AXES[len(sizes)], map(int, sizes), strict=True))


# ---------------------------------------------------------------- cases


def each(make: Callable[..., Case], *shapes: tuple[float, ...]) -> Draw:
    """Make a case of each shape."""
    return lambda rng: [make(rng, *shape) for shape in shapes]


def mesh(rng: np.random.Generator, *sizes: int) -> Case:
    """Return a mesh of these sizes."""
    return Case(({"sizes": np.array(sizes)},) * prod(sizes), str(named(sizes)))


def question(rng: np.random.Generator, dp: int, pp: int, tp: int) -> Case:
    """Ask for the bytes of every stage of a random model."""
    hidden, intermediate, tokens = 2 * dp * tp * rng.integers(1, 9, 3)
    model = [pp * rng.integers(1, 5), hidden, intermediate, tokens, rng.integers(1, 9), rng.choice([2, 4])]
    return Case(({"sizes": np.array([dp, pp, tp]), "model": np.array(model)},), str(named((dp, pp, tp))))


def training(rng: np.random.Generator, dp: int, tp: int, blocks: int) -> Case:
    """Draw a model of some blocks, and a batch."""
    rows, hidden, inner = int(rng.integers(2, 4)), int(rng.integers(3, 6)), tp * int(rng.integers(2, 4))
    batch = rng.normal(size=(2, dp, rows, hidden))
    ups, downs = rng.normal(size=(blocks, hidden, inner)) / 2, rng.normal(size=(blocks, inner, hidden)) / 2
    shared = {"sizes": np.array([dp, tp]), "ups": ups, "downs": downs, "rate": np.array(rng.uniform(0.1, 0.5))}
    given = tuple({**shared, "x": batch[0, r // tp], "targets": batch[1, r // tp]} for r in range(dp * tp))
    return Case(given, f"{named((dp, tp))}, {blocks} block{'s'[: blocks - 1]}")


def gradients(rng: np.random.Generator, pp: int, tp: int, share: float) -> Case:
    """Draw a gradient of each kind; the limit is `share` of their norm."""
    values = rng.normal(size=(pp, tp, len(KINDS), int(rng.integers(1, 5))))
    for kind, (cut, tied) in enumerate(KINDS):
        values[:, :, kind] = values[:1, :, kind] if tied else values[:, :, kind]
        values[:, :, kind] = values[:, :, kind] if cut else values[:, :1, kind]
    shared = {"sizes": np.array([1, pp, tp]), "limit": np.array(share * norm_of(values))}
    return Case(tuple({**shared, "values": mine} for row in values for mine in row), f"pp={pp} tp={tp}")


def norm_of(values: Any) -> float:
    """Return the norm of `values` [pp, tp, kind, elements], with what several ranks hold counted once."""
    once = [values[: 1 if tied else None, : None if cut else 1, kind] for kind, (cut, tied) in enumerate(KINDS)]
    return float(sum((part**2).sum() for part in once) ** 0.5)


def machine(
    rng: np.random.Generator, ranks: int, per_node: int, inside: float, across: float, sequences: int = 0
) -> Case:
    """Draw a model for a cluster with these bandwidths, in GB/s.

    With one or two `sequences` the memory is just enough for four stages of two ranks each, with more for anything.
    """
    hidden, layers = 128 * int(rng.integers(8, 25)), int(rng.choice([8, 12, 16, 24]))
    model = [layers, hidden, 64 * (hidden // 24), 8, 2048, int(rng.choice([16, 32, 48]))]
    states = 16 * layers * (4 * hidden**2 + 3 * hidden * model[2])
    memory = states / rng.uniform(1.2, 4) + 20 * layers * 2048 * hidden
    if sequences:
        model[5] = sequences
        memory = states / 8 + min(4, sequences) * (layers // 4) * 34 * 2048 * hidden / 2
        memory = memory if sequences < 3 else 1e15
    given = {"model": np.array(model), "ranks": np.array([ranks, per_node])}
    given["machine"] = np.array([inside * 1e9, across * 1e9, memory, rng.uniform(1e14, 4e14)])
    return Case((given,), f"{ranks} ranks, {per_node} a node")


# ---------------------------------------------------------------- programs: on every rank, with the student's module


def placed(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1; every communicator has to bring together the numbers of its ranks."""
    sizes, found = named(given["sizes"]), {}
    place = exercise.coordinates(comm.rank, dict(sizes))
    for axis in sizes:
        along = exercise.communicator(axis, comm, dict(sizes))
        came = all_gather(np.array([comm.rank]), along, counts=[1] * along.size)
        found |= {f"group {axis}": exercise.group(axis, comm.rank, dict(sizes)), f"communicator {axis}": came}
    return {"place": [place[axis] for axis in sizes], **found}


def counted(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 for every stage."""
    sizes, model = named(given["sizes"]), dict(zip(SIZES, map(int, given["model"]), strict=True))
    answers = [exercise.bytes_per_step(dict(sizes), stage, **model) for stage in range(sizes["pp"])]
    return {"bytes": [[answer[axis] for axis in sizes] for answer in answers]}


def trained(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Take two steps of task 3; return the losses and the values of this rank's blocks."""
    mesh = Mesh(comm, Layout(**named(given["sizes"])))
    ups, downs = (np.split(given[name], mesh.tp.size, axis)[mesh.tp.rank] for name, axis in (("ups", 2), ("downs", 1)))
    blocks = [(torch.tensor(up), torch.tensor(down)) for up, down in zip(ups, downs, strict=True)]
    x, targets = torch.tensor(given["x"]), torch.tensor(given["targets"])
    losses = [float(exercise.train_step(blocks, x, targets, float(given["rate"]), mesh.dp, mesh.tp)) for _ in range(2)]
    left = any(tensor.requires_grad for block in blocks for tensor in block)
    ups, downs = (torch.stack(values).detach().numpy() for values in zip(*blocks, strict=True))
    return {"losses": losses, "ups": ups, "downs": downs, "left": left}


def clipped(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4; return the norm and the gradients."""
    mesh = Mesh(comm, Layout(**named(given["sizes"])))
    kinds = zip(given["values"], KINDS, strict=True)
    mine = [SimpleNamespace(values=values.copy(), cut=cut, tied=tied) for values, (cut, tied) in kinds]
    given_arrays = [gradient.values for gradient in mine]
    norm = exercise.clip(mine, float(given["limit"]), mesh.tp, mesh.pp)
    return {"norm": float(norm), "values": np.stack(given_arrays)}


def chosen(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5."""
    (inside, across, memory, flops), (ranks, per_node) = given["machine"].tolist(), given["ranks"].tolist()
    cluster = Cluster(Link(0.0, inside), Link(0.0, across), per_node)
    model = dict(zip(MODEL, map(int, given["model"]), strict=True))
    found = exercise.layouts_that_fit(ranks, cluster, memory=memory, flops=flops, **model)
    return {"layouts": [[*layout, seconds] for layout, seconds in sorted(found.items())]}


# ---------------------------------------------------------------- judges: in the grader's process


def groups_of(sizes: Sequence[int]) -> dict[str, list[list[int]]]:
    """Return the group of every rank along every axis."""
    array, found = np.arange(prod(sizes)).reshape(sizes), {}
    for number, axis in enumerate(named(sizes)):
        rows = np.moveaxis(array, number, -1).reshape(-1, sizes[number]).tolist()
        found[axis] = [next(row for row in rows if rank in row) for rank in range(array.size)]
    return found


def judge_placed(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Coordinates are digits, a group is a slice, and a communicator is a group."""
    sizes = case.given[0]["sizes"].tolist()
    for rank, result in enumerate(results):
        asked, place = f"{rank}, {named(sizes)}", np.unravel_index(rank, sizes)
        if result["place"].tolist() != [*map(int, place)]:
            raise Wrong(f"coordinates({asked}) are {named(result['place'])}, expected {named(place)}")
        for axis, groups in groups_of(sizes).items():
            if (members := result[f"group {axis}"].tolist()) != groups[rank]:
                raise Wrong(f"group({axis!r}, {asked}) is {members}, expected {groups[rank]}")
            if (members := result[f"communicator {axis}"].tolist()) != groups[rank]:
                raise Wrong(f"rank {rank}: the communicator along {axis} has {members}, expected {groups[rank]}")
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
                says = f"{asked} says {found} along {axis}, expected {expected}"
                for clause, value in miscounted(*sizes, stage, model)[axis].items():
                    if found == value:
                        raise Wrong(f"{says}: this is what comes out if {clause}")
                raise Wrong(says)


def serial_step(given: Arrays, x: Any, targets: Any, ups: Any, downs: Any) -> float:
    """Take a step on whole matrices [blocks, ...], in place; return the loss before it."""
    parameters = [torch.tensor(values, requires_grad=True) for values in (ups, downs)]
    y = torch.tensor(x)
    for up, down in zip(*parameters, strict=True):
        y = torch.relu(y @ up) @ down
    loss = (y - torch.tensor(targets)).square().mean()
    loss.backward()
    for values, parameter in zip((ups, downs), parameters, strict=True):
        values -= given["rate"] * parameter.grad.numpy()
    return float(loss.detach())


def judge_trained(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The slices of the serial model, and no more bytes on either axis than the places need."""
    first, (dp, tp) = case.given[0], map(int, case.given[0]["sizes"])
    ups, downs = first["ups"].copy(), first["downs"].copy()
    x, targets = (np.concatenate([given[name] for given in case.given[::tp]]) for name in ("x", "targets"))
    losses = np.array([serial_step(first, x, targets, ups, downs) for _ in range(2)])
    for rank, result in enumerate(results):
        expect_close(rank, "the loss of step", result["losses"], losses)
        expect_close(rank, "up of block", result["ups"], np.split(ups, tp, axis=2)[rank % tp])
        expect_close(rank, "down of block", result["downs"], np.split(downs, tp, axis=1)[rank % tp])
        if result["left"]:
            raise Wrong(f"rank {rank}: blocks require gradients after the step, and did not before it")
    groups, held = groups_of([dp, tp]), (ups.size + downs.size) // tp
    places = {"dp": (dp, [held, 1]), "tp": (tp, [len(first["x"]) * ups.shape[1]] * (2 * len(ups) - 1))}
    for rank, (axis, (ranks, buffers)) in product(range(dp * tp), places.items()):
        most = 2 * sum(8 * length * (ranks - 1 if ranks < 3 else 2) for length in buffers)
        found = sum(note.bytes for note in sent_by(rank, notes) if note.to in groups[axis][rank])
        if found > most:
            raise Wrong(f"rank {rank} sent {found} bytes along {axis} in two steps, expected no more than {most}")


def judge_clipped(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The norm of what the serial model has, on every rank, for one number along each axis."""
    (_, pp, tp), limit = map(int, case.given[0]["sizes"]), float(case.given[0]["limit"])
    values = np.stack([given["values"] for given in case.given])
    norm = norm_of(values.reshape(pp, tp, *values.shape[1:]))
    scale = limit / (norm + 1e-6) if norm > limit else 1.0
    for rank, (given, result) in enumerate(zip(case.given, results, strict=True)):
        expect_close(rank, "the norm", result["norm"], np.array(norm))
        values = scale * given["values"]
        expect_close(rank, "the array given, of kind", result["values"], values, before=given["values"])
        found, most = sum(note.bytes for note in notes if note.rank == rank), 8 * (pp + tp - 2)
        if found > most:
            raise Wrong(f"rank {rank} sent {found} bytes, expected no more than {most}: a number along each axis")


def judge_chosen(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """All layouts that fit and no others, each with its seconds."""
    expected = all_that_fit(case.given[0])
    found = {tuple(map(int, row[:3])): float(row[3]) for row in results[0]["layouts"].reshape(-1, 4)}
    for layout in sorted(expected.keys() ^ found.keys()):
        (dp, pp, tp), (ranks, _) = layout, case.given[0]["ranks"].tolist()
        layers, _, _, heads, _, sequences = case.given[0]["model"].tolist()
        why = "needs more than the memory"
        if dp * pp * tp != ranks or layers % pp or heads % tp or sequences % dp:
            why = f"is not possible: {ranks} ranks, {layers} layers, {heads} heads, {sequences} sequences do not divide"
        what = f"is missing, but fits: with m = {sequences / dp:g}, min(pp, m) microbatches are under way"
        raise Wrong(f"the layout (dp, pp, tp) = {layout} {what if layout in expected else why}")
    for layout, seconds in expected.items():
        if not abs(found[layout] - seconds) <= 1e-6 * seconds:
            says = f"a step of (dp, pp, tp) = {layout} takes {found[layout]:.6g} s, expected {seconds:.6g} s"
            for how, clause in SLIPS.items():
                if abs(all_that_fit(case.given[0], how)[layout] - found[layout]) <= 1e-6 * seconds:
                    says += f": this is what comes out if {clause}"
                    break
            raise Wrong(says)


SLIPS = {
    "rank 0": "the link is that of rank 0's group alone",
    "first stage": "the bytes are those of the first stage",
    "stretches all": "the bubble stretches pp and dp as well",
    "across": "all links are taken for those across nodes",
    "inside": "all links are taken for those inside a node",
    "no bubble": "there is no bubble",
}


def all_that_fit(given: Arrays, how: str = "") -> dict[tuple[int, int, int], float]:
    """Return the seconds of a step of every layout that fits; `how` is one of `SLIPS`."""
    layers, hidden, intermediate, heads, sequence, sequences = given["model"].tolist()
    (inside, across, memory, flops), (ranks, per_node) = given["machine"].tolist(), given["ranks"].tolist()
    matrices, found = layers * (4 * hidden**2 + 3 * hidden * intermediate), {}
    compute = 6 * matrices * sequence * sequences / (ranks * flops)
    for dp, pp, tp in product(range(1, ranks + 1), repeat=3):
        if dp * pp * tp != ranks or layers % pp or heads % tp or sequences % dp:
            continue
        m = sequences // dp
        if 16 * matrices / (pp * tp) + min(pp, m) * (layers // pp) * 34 * sequence * hidden / tp > memory:
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


CHECKS = [
    Check(GROUPS, "three axes", 10, each(mesh, (2, 2, 2), (4, 1, 2)), placed, judge_placed),
    Check(GROUPS, "four axes", 3, each(mesh, (2, 1, 3, 2)), placed, judge_placed),
    Check(GROUPS, "the same under mpirun", 3, each(mesh, (1, 2)), placed, judge_placed, wire="mpi"),
    Check(BYTES, "every stage", 9, each(question, (2, 3, 2), (4, 2, 1), (1, 4, 4)), counted, judge_counted),
    Check(STEP, "tensor parallel alone", 4, each(training, (1, 2, 2)), trained, judge_trained),
    Check(STEP, "data parallel alone", 4, each(training, (2, 1, 2)), trained, judge_trained),
    Check(STEP, "both", 8, each(training, (2, 2, 1), (2, 2, 2)), trained, judge_trained),
    Check(STEP, "the same under mpirun", 3, each(training, (1, 2, 2)), trained, judge_trained, wire="mpi"),
    Check(NORM, "one axis alone", 4, each(gradients, (1, 2, 0.5), (2, 1, 0.5)), clipped, judge_clipped),
    Check(NORM, "both axes", 6, each(gradients, (2, 2, 0.5)), clipped, judge_clipped),
    Check(NORM, "a limit that is not reached", 3, each(gradients, (2, 2, 2.0)), clipped, judge_clipped),
    Check(NORM, "the same under mpirun", 3, each(gradients, (1, 2, 0.5)), clipped, judge_clipped, wire="mpi"),
    Check(
        CHOICE,
        "all that fit",
        8,
        each(machine, (8, 4, 450, 50), (16, 8, 300, 6), (8, 6, 450, 50, 2)),
        chosen,
        judge_chosen,
    ),
]

# ---- hidden: the handout ends here ----

CHECKS += [
    Check(GROUPS, "other meshes", 6, each(mesh, (3, 2, 4), (1, 5, 2)), placed, judge_placed, hidden=True),
    Check(BYTES, "other models", 8, each(question, (8, 1, 2), (2, 5, 8)), counted, judge_counted, hidden=True),
    Check(STEP, "other sizes", 6, each(training, (2, 2, 3), (4, 2, 2)), trained, judge_trained, hidden=True),
    Check(NORM, "other gradients", 4, each(gradients, (2, 2, 0.9)), clipped, judge_clipped, hidden=True),
    Check(
        CHOICE,
        "others",
        8,
        each(machine, (8, 2, 450, 25), (16, 16, 450, 1), (8, 6, 300, 6, 6)),
        chosen,
        judge_chosen,
        hidden=True,
    ),
]
