"""Lesson 14: what is checked, and for how many points. Along which axis a message went shows from
its two ends.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from judges import KINDS, SIZES, judge_clipped, judge_counted, named, norm_of
from judges_groups import judge_placed
from judges_layouts import judge_chosen
from judges_step import judge_trained

from minidist import Cluster, Communicator, Layout, Mesh
from minidist.course.grader.contract import Arrays, Case, Check, Draw, Task
from minidist.full.collectives import all_gather
from minidist.full.comm.threads_wire.cluster import Link

BY_HAND = ("minidist.mesh", "minidist.full.mesh")
STRATEGIES = (
    *(f"minidist.{page}" for page in ("ddp", "zero", "fsdp", "tensor", "train")),
    *(f"minidist.full.{name}" for name in ("apply", "data_axis", "ddp", "zero", "fsdp")),
    *(f"minidist.full.{name}" for name in ("tensor.plan", "clip")),
)
GROUPS = Task(1, "coordinates and groups", BY_HAND, may_use=("comm.split",))
BYTES = Task(2, "bytes along each axis", BY_HAND)
STEP = Task(3, "a step on two axes", BY_HAND + STRATEGIES)
NORM = Task(4, "one norm for the mesh", BY_HAND + STRATEGIES)
CHOICE = Task(5, "which layout", BY_HAND)

MODEL = ("layers", "hidden", "intermediate", "heads", "sequence", "sequences")


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
    model = [
        pp * rng.integers(1, 5),
        hidden,
        intermediate,
        tokens,
        rng.integers(5, 10),
        8 if tp < 8 else 2,
    ]
    return Case(
        ({"sizes": np.array([dp, pp, tp]), "model": np.array(model)},), str(named((dp, pp, tp)))
    )


def training(rng: np.random.Generator, dp: int, tp: int, blocks: int) -> Case:
    """Draw a model of some blocks, and a batch."""
    rows, hidden, inner = (
        int(rng.integers(2, 4)),
        int(rng.integers(3, 6)),
        tp * int(rng.integers(2, 4)),
    )
    batch = rng.normal(size=(2, dp, rows, hidden))
    ups, downs = (
        rng.normal(size=(blocks, hidden, inner)) / 2,
        rng.normal(size=(blocks, inner, hidden)) / 2,
    )
    shared = {
        "sizes": np.array([dp, tp]),
        "ups": ups,
        "downs": downs,
        "rate": np.array(rng.uniform(0.1, 0.5)),
    }
    given = tuple(
        {**shared, "x": batch[0, r // tp], "targets": batch[1, r // tp]} for r in range(dp * tp)
    )
    return Case(given, f"{named((dp, tp))}, {blocks} block{'s'[: blocks - 1]}")


def gradients(rng: np.random.Generator, pp: int, tp: int, share: float) -> Case:
    """Draw a gradient of each kind; the limit is `share` of their norm."""
    values = rng.normal(size=(pp, tp, len(KINDS), int(rng.integers(1, 5))))
    for kind, (cut, tied) in enumerate(KINDS):
        values[:, :, kind] = values[:1, :, kind] if tied else values[:, :, kind]
        values[:, :, kind] = values[:, :, kind] if cut else values[:, :1, kind]
    shared = {"sizes": np.array([1, pp, tp]), "limit": np.array(share * norm_of(values))}
    return Case(
        tuple({**shared, "values": mine} for row in values for mine in row), f"pp={pp} tp={tp}"
    )


def machine(
    rng: np.random.Generator,
    ranks: int,
    per_node: int,
    inside: float,
    across: float,
    sequences: int = 0,
) -> Case:
    """Draw a model for a cluster with these bandwidths, in GB/s.

    With one or two `sequences` the memory is just enough for four stages of two ranks each, with
    more for anything.
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
        found |= {
            f"group {axis}": exercise.group(axis, comm.rank, dict(sizes)),
            f"communicator {axis}": came,
        }
    return {"place": [place[axis] for axis in sizes], **found}


def counted(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 for every stage."""
    sizes, model = named(given["sizes"]), dict(zip(SIZES, map(int, given["model"]), strict=True))
    answers = [exercise.bytes_per_step(dict(sizes), stage, **model) for stage in range(sizes["pp"])]
    return {"bytes": [[answer[axis] for axis in sizes] for answer in answers]}


def trained(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Take two steps of task 3; return the losses and the values of this rank's blocks."""
    mesh = Mesh(comm, Layout(**named(given["sizes"])))
    ups, downs = (
        np.split(given[name], mesh.tp.size, axis)[mesh.tp.rank]
        for name, axis in (("ups", 2), ("downs", 1))
    )
    blocks = [(torch.tensor(up), torch.tensor(down)) for up, down in zip(ups, downs, strict=True)]
    x, targets = torch.tensor(given["x"]), torch.tensor(given["targets"])
    losses = [
        float(exercise.train_step(blocks, x, targets, float(given["rate"]), mesh.dp, mesh.tp))
        for _ in range(2)
    ]
    left = any(tensor.requires_grad for block in blocks for tensor in block)
    ups, downs = (torch.stack(values).detach().numpy() for values in zip(*blocks, strict=True))
    return {"losses": losses, "ups": ups, "downs": downs, "left": left}


def clipped(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4; return the norm and the gradients."""
    mesh = Mesh(comm, Layout(**named(given["sizes"])))
    kinds = zip(given["values"], KINDS, strict=True)
    mine = [
        SimpleNamespace(values=values.copy(), cut=cut, tied=tied) for values, (cut, tied) in kinds
    ]
    given_arrays = [gradient.values for gradient in mine]
    norm = exercise.clip(mine, float(given["limit"]), mesh.tp, mesh.pp)
    return {"norm": float(norm), "values": np.stack(given_arrays)}


def chosen(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5."""
    (inside, across, memory, flops), (ranks, per_node) = (
        given["machine"].tolist(),
        given["ranks"].tolist(),
    )
    cluster = Cluster(Link(0.0, inside), Link(0.0, across), per_node)
    model = dict(zip(MODEL, map(int, given["model"]), strict=True))
    found = exercise.layouts_that_fit(ranks, cluster, memory=memory, flops=flops, **model)
    return {"layouts": [[*layout, seconds] for layout, seconds in sorted(found.items())]}


CHECKS = [
    Check(GROUPS, "three axes", 10, each(mesh, (2, 2, 2), (4, 1, 2)), placed, judge_placed),
    Check(GROUPS, "four axes", 3, each(mesh, (2, 1, 3, 2)), placed, judge_placed),
    Check(GROUPS, "the same under mpirun", 3, each(mesh, (1, 2)), placed, judge_placed, wire="mpi"),
    Check(
        BYTES,
        "every stage",
        9,
        each(question, (3, 4, 5), (4, 2, 1), (1, 4, 4)),
        counted,
        judge_counted,
    ),
    Check(STEP, "tensor parallel alone", 4, each(training, (1, 2, 2)), trained, judge_trained),
    Check(STEP, "data parallel alone", 4, each(training, (2, 1, 2)), trained, judge_trained),
    Check(STEP, "both", 8, each(training, (2, 2, 1), (2, 2, 2)), trained, judge_trained),
    Check(
        STEP,
        "the same under mpirun",
        3,
        each(training, (1, 2, 2)),
        trained,
        judge_trained,
        wire="mpi",
    ),
    Check(
        NORM, "one axis alone", 4, each(gradients, (1, 2, 0.5), (2, 1, 0.5)), clipped, judge_clipped
    ),
    Check(NORM, "both axes", 6, each(gradients, (2, 2, 0.5)), clipped, judge_clipped),
    Check(
        NORM, "a limit that is not reached", 3, each(gradients, (2, 2, 2.0)), clipped, judge_clipped
    ),
    Check(
        NORM,
        "the same under mpirun",
        3,
        each(gradients, (1, 2, 0.5)),
        clipped,
        judge_clipped,
        wire="mpi",
    ),
    Check(
        CHOICE,
        "all that fit",
        8,
        each(machine, (8, 4, 450, 50), (16, 8, 300, 6), (8, 6, 450, 50, 2)),
        chosen,
        judge_chosen,
    ),
]

# ---- hidden: other cases of the checks above ----

CHECKS += [
    Check(
        GROUPS,
        "other meshes",
        6,
        each(mesh, (3, 2, 4), (1, 5, 2)),
        placed,
        judge_placed,
        hidden=True,
    ),
    Check(
        BYTES,
        "other models",
        8,
        each(question, (8, 1, 2), (2, 5, 8)),
        counted,
        judge_counted,
        hidden=True,
    ),
    Check(
        STEP,
        "other sizes",
        6,
        each(training, (2, 2, 3), (4, 2, 2)),
        trained,
        judge_trained,
        hidden=True,
    ),
    Check(
        NORM,
        "other gradients",
        4,
        each(gradients, (2, 2, 0.9)),
        clipped,
        judge_clipped,
        hidden=True,
    ),
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
