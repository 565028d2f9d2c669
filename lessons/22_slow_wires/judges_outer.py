"""Lesson 22, task 2: sites that meet now and then, the known mistakes, and the judges."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import eq
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from minidist import Communicator
from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong, expect_ranks, known
from minidist.full.collectives import all_reduce

INNER = 0.2  # of the inner optimizer, SGD on parabolas whose lowest points differ from site to site


def met(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 beside an inner optimizer; note parameters and bytes after each step."""
    sizes = given["sizes"].tolist()
    before = comm.traffic.bytes
    for size in sizes:
        all_reduce(np.zeros(size), comm)
    one = comm.traffic.bytes - before
    whole = given["parameters"].copy()
    parameters = np.split(whole, np.cumsum(sizes)[:-1])
    before = comm.traffic.bytes
    outer = exercise.OuterStep(
        list(parameters), comm, int(given["every"]), float(given["lr"]), float(given["momentum"])
    )
    sent, seen = [comm.traffic.bytes - before], []
    for target in given["targets"]:
        whole -= INNER * (whole - target)
        before = comm.traffic.bytes
        outer.stepped()
        sent.append(comm.traffic.bytes - before)
        seen.append(whole.copy())
    return {"seen": np.array(seen), "sent": np.array(sent), "one": one}


class Asked(NamedTuple):
    """What a case asks for."""

    every: int
    lr: float
    momentum: float
    first: int  # elements of the first parameter


def trained(start: Array, targets: Array, asked: Asked, how: str = "") -> Array:
    """Return the parameters of each site after each step [P, T, n]; targets are [P, T, n], and
    `how` is one of `SLIPS`.
    """
    every, lr, momentum, first = asked
    sites, steps, _ = targets.shape
    own = np.tile(start, (sites, 1))
    shared, met_before = own.copy(), False
    velocity = np.zeros_like(own)
    seen = []
    for step in range(1, steps + 1):
        own = own - INNER * (own - targets[:, step - 1])
        meets = {
            "every step": True,
            "never": False,
            "first step": step % every == 1 % every,
            "one late": step > 1 and (step - 1) % every == 0,
            "one early": (step + 1) % every == 0,
            "once": step == every,
            "after H + 1": step % (every + 1) == 0,
            "after H - 1": step % max(1, every - 1) == 0,
            "from H on": step >= every,
        }.get(how, step % every == 0)
        if meets:
            before = own
            shared = own if how == "same array later" and met_before else shared
            own, shared, velocity = meeting(own, shared, velocity, lr, momentum, every, how)
            met_before = True
            for name, part in (
                ("first alone", slice(first, None)),
                ("last alone", slice(0, first)),
            ):
                if how == name:
                    own[:, part] = before[:, part]
        seen.append(own)
    return np.stack(seen, axis=1)


def meeting(
    own: Array,
    shared: Array,
    velocity: Array,
    lr: float,
    momentum: float,
    every: int,
    how: str,
) -> tuple[Array, Array, Array]:
    """Return own and shared parameters and velocities after a meeting."""
    moved = own - shared if how == "other sign" else shared - own
    mean = {
        "own alone": moved,
        "sum": np.tile(moved.sum(0), (len(own), 1)),
        "by the steps": np.tile(moved.mean(0) / every, (len(own), 1)),
    }.get(how, np.tile(moved.mean(0), (len(own), 1)))
    if how == "forgets the velocity":
        velocity = np.zeros_like(velocity)
    velocity = {
        "velocity of its own": momentum * velocity + moved,
        "dampened": momentum * velocity + (1 - momentum) * mean,
        "with the rate in it": momentum * velocity + lr * mean,
    }.get(how, momentum * velocity + mean)
    step = {
        "heavy ball": velocity,
        "velocity twice": velocity + momentum * velocity,
        "no momentum": mean,
        "without the gradient": momentum * velocity,
        "rate twice": lr * mean + momentum * velocity,
        "rate once more": lr * (mean + momentum * velocity),
        "rate doubled": 2 * (mean + momentum * velocity),
        "rate halved": (mean + momentum * velocity) / 2,
        "rate left out": (mean + momentum * velocity) / lr,
        "without momentum's factor": mean + velocity,
    }.get(how, mean + momentum * velocity)
    begin = {"from its own": own, "from the mean": np.tile(own.mean(0), (len(own), 1))}
    after = begin.get(how, shared) - lr * step
    if how == "mean of parameters":
        after = np.tile(own.mean(0), (len(own), 1))
    if how == "adds":
        after = shared + lr * step
    if how == "half of its own":
        return (own + after) / 2, after, velocity
    kept = {"stays where it was": shared, "remembers its own": own}.get(how, after)
    return (own.copy() if how == "not written back" else after), kept, velocity


SLIPS = {
    "other sign": "the gradient has the other sign, after minus before: the outer step then takes "
    "back what the sites have learned",
    "adds": "the outer step is added: an optimizer subtracts it",
    "from its own": "the outer step starts where this site is now, not where all sites were the same: "
    "then sites stay apart",
    "from the mean": "the outer step starts at the mean of where the sites are now: what they have "
    "moved counts twice",
    "not written back": "each site goes on from its own parameters. Either the new ones are not written "
    "into the arrays, in place; or what all sites had is no copy but the same arrays, which the inner "
    "optimizer changes, so that nothing seems to have moved",
    "same array later": "after the first meeting what all sites have is remembered as the same arrays, "
    "which the inner optimizer changes, and not as copies",
    "half of its own": "each site goes on from the mean of its own and the new parameters",
    "first alone": "only the first parameter is updated",
    "last alone": "only the last parameter is updated",
    "stays where it was": "the shared parameters are never updated: each outer step starts from the "
    "very first ones",
    "remembers its own": "what this site had before the outer step is remembered as shared, not what "
    "all have after it",
    "own alone": "each site takes its own way for the mean: nothing is averaged",
    "sum": "the sites' ways are added up, not averaged",
    "by the steps": "the way is divided by H, as if it were a mean over the steps",
    "mean of parameters": "the sites' parameters are averaged: there is no outer optimizer",
    "no momentum": "there is no momentum",
    "heavy ball": "the momentum is not Nesterov's: the step is the velocity alone, or adds the velocity as "
    "it was before this meeting, which is the same",
    "velocity twice": "the velocity takes the gradient's place: the step is the velocity and its "
    "momentum",
    "without the gradient": "the gradient is missing in the step: only the velocity is there",
    "without momentum's factor": "the velocity in the step lacks its factor momentum",
    "velocity of its own": "each site's velocity is that of its own way, not of the mean",
    "forgets the velocity": "the velocity begins at 0 at each meeting",
    "dampened": "the gradient enters the velocity times 1 - momentum",
    "with the rate in it": "the learning rate is in the velocity, and then once more in the step",
    "rate twice": "the gradient is multiplied by lr before the step is",
    "rate once more": "the step is multiplied by lr twice",
    "rate doubled": "the step is twice as long: it is multiplied by 2 lr, not by lr",
    "rate halved": "the step is half as long: it is multiplied by lr / 2, not by lr",
    "rate left out": "the step is not multiplied by lr",
    "from H on": "after the first H steps the sites meet after each step: count anew from a meeting",
    "after H - 1": "the sites meet after every H - 1 steps",
    "every step": "the sites meet after each step, not after every H",
    "never": "the sites never meet",
    "first step": "the sites meet after the first step, and then every H",
    "one late": "the sites meet one step late",
    "one early": "the sites meet one step early",
    "once": "the sites meet only once",
    "after H + 1": "the sites meet after every H + 1 steps",
}


def judge_steps(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The parameters of each site after each step."""
    start, asked = asked_of(case)
    targets = np.stack([given["targets"] for given in case.given])
    expected = trained(start, targets, asked)
    ways = {clause: trained(start, targets, asked, how) for how, clause in SLIPS.items()}
    fitting = {
        clause: way
        for clause, way in ways.items()
        if all(np.allclose(result["seen"], way[rank]) for rank, result in enumerate(results))
    } or ways
    for step in range(targets.shape[1]):
        place = "when they meet" if (step + 1) % asked.every == 0 else "between two meetings"
        expect_ranks(
            f"{case.label}: after step {step + 1}, {place}, the parameters",
            [result["seen"][step] for result in results],
            list(expected[:, step]),
            instead={clause: way[:, step] for clause, way in fitting.items()},
        )


def judge_silence(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> dict[str, float]:
    """The bytes of one all-reduce of each parameter when sites meet, and none at any other time."""
    _, asked = asked_of(case)
    for rank, result in enumerate(results):
        one, sent = int(result["one"]), result["sent"].tolist()
        if sent[0]:
            raise Wrong(
                f"{case.label}: rank {rank} sends {sent[0]} bytes when an OuterStep is made, expected "
                "none: all sites have the same parameters already"
            )
        for step, found in enumerate(sent[1:], start=1):
            meets = step % asked.every == 0
            if found == (one if meets else 0):
                continue
            if not meets:
                raise Wrong(
                    f"{case.label}: rank {rank} sends {found} bytes after step {step}, expected "
                    f"none: the sites meet after every {asked.every} steps, and only then may the "
                    "slow wire be used"
                )
            ways = {
                "two all-reduces for each parameter are sent (is the velocity averaged, too? it is the "
                "same on all sites already)": 2 * one,
                "three all-reduces for each parameter are sent": 3 * one,
                "nothing is sent: then nobody knows where the others are": 0,
            }
            raise Wrong(
                f"{case.label}: rank {rank} sends {found} bytes after step {step}, when the sites "
                f"meet, expected {one}, as one all-reduce of each parameter does"
                + known(ways, partial(eq, found))
            )
    steps = len(results[0]["seen"])
    return {"bytes a step between sites": steps // asked.every * float(results[0]["one"]) / steps}


def asked_of(case: Case) -> tuple[Array, Asked]:
    """Return the first parameters, and what is asked."""
    given = case.given[0]
    numbers = int(given["every"]), float(given["lr"]), float(given["momentum"])
    asked = Asked(*numbers, first=int(given["sizes"][0]))
    return given["parameters"], asked
