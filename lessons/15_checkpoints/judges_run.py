"""Lesson 15, tasks 4 and 5: the judges of a run that goes on, and of how often to save."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from math import exp, expm1

import numpy as np

from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong, expect_close, known


class Training:
    """Task 4's run: a regression with dropout on 7 rows, two a step."""

    def __init__(self, seed: int) -> None:
        self.seed, self.generator = seed, np.random.default_rng(seed)
        self.weights, self.mean, self.square = ({"w": self.generator.random(3)} for _ in range(3))
        self.step, self.position, self.order = 0, 7, np.arange(7)

    def take_step(self) -> float:
        """Return the loss before it."""
        if self.position + 2 > 7:
            self.generator.shuffle(self.order)  # in place
            self.position = 0
        rows = self.order[self.position : self.position + 2]
        self.position, self.step = self.position + 2, self.step + 1
        x = (np.outer(rows + 1, (1, 2, 3)) % 5 - 2) * (self.generator.random((2, 3)) > 0.2)
        # no matrix product: its bits depend on where arrays lie
        error = (x * self.weights["w"]).sum(1) - rows
        gradient = (x * error[:, None]).sum(0)
        self.mean["w"] += 0.1 * (gradient - self.mean["w"])
        self.square["w"] += 0.01 * (gradient**2 - self.square["w"])
        self.weights["w"] -= 0.1 * self.mean["w"] / (1 - 0.9**self.step) / np.sqrt(self.square["w"])
        return float((error**2).sum())


def judge_resumed(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The losses of the run that nothing disturbed: another process may round the last bit
    otherwise.
    """
    facts = case.given[0]["facts"].tolist()
    undisturbed = went_on(facts, 0, lambda saved, later, new: {})
    for number, (found, who) in enumerate(
        zip(results[0]["losses"], ("undisturbed", *RESUMED), strict=True)
    ):
        instead = {
            clause: partial(went_on, facts, number, other) for clause, other in FORGOTTEN.items()
        }
        for names in (MOMENTS, ("order",), (*MOMENTS, "order"), ("weights",)):
            clause = f"{RESUMED[who]} {', '.join(names)}" if number else ""
            instead[clause] = partial(went_on, facts, number, partial(of_later, names))
        name = f"{who}: the loss of the next steps"
        if number and not np.isfinite(found).all():
            why = known(instead, lambda way: np.allclose(found, way, 1e-9, 0, equal_nan=True))  # noqa: B023
            said = f"{name} are {', '.join(f'{loss:.6g}' for loss in found)}, expected numbers"
            if why:
                raise Wrong(said + why)
        expect_close(0, name, found, undisturbed, 1e-12, instead=instead if number else {})


MOMENTS = ("weights", "mean", "square")
RESUMED = {
    "resumed": "the run's own arrays are saved, which training goes on changing:",
    "resumed again": "the run is given the saved arrays themselves, and changes them:",
}


def of_later(
    names: Sequence[str], saved: Training, later: Training, new: Training
) -> dict[str, object]:
    """Return what a run has if these arrays change with another, which went on."""
    return {name: getattr(later, name) for name in names}


def zeros(run: Training) -> dict[str, Array]:
    """Return moments of a run that has not taken a step."""
    return {name: np.zeros_like(array) for name, array in run.weights.items()}


FORGOTTEN: dict[str, Callable[[Training, Training, Training], dict[str, object]]] = {
    "the place in the epoch is forgotten, so it begins again": lambda saved, later, new: {
        "position": 0
    },
    "the order of the epoch is drawn anew": lambda saved, later, new: {
        "order": saved.generator.permutation(7)
    },
    "the order of the epoch is not restored": lambda saved, later, new: {"order": new.order},
    "the count of steps is not restored": lambda saved, later, new: {"step": new.step},
    "the generator is not restored": lambda saved, later, new: {"generator": new.generator},
    "the place in the epoch is not restored": lambda saved, later, new: {"position": new.position},
    "the epoch is taken to have ended": lambda saved, later, new: {"position": 7},
    "the place in the epoch is one batch further": lambda saved, later, new: {
        "position": saved.position + 2
    },
    "the order of the epoch is sorted": lambda saved, later, new: {"order": np.sort(saved.order)},
    "the count of steps is one more": lambda saved, later, new: {"step": saved.step + 1},
    "the count of steps is one less": lambda saved, later, new: {"step": saved.step - 1},
    "Adam's moments are not restored": lambda saved, later, new: {
        "mean": new.mean,
        "square": new.square,
    },
    "Adam's first moments are not restored": lambda saved, later, new: {"mean": new.mean},
    "Adam's second moments are not restored": lambda saved, later, new: {"square": new.square},
    "the weights are not restored": lambda saved, later, new: {"weights": new.weights},
    "neither weights nor moments are restored": lambda saved, later, new: {
        "weights": new.weights,
        "mean": new.mean,
        "square": new.square,
    },
    "Adam's moments begin at 0 again": lambda saved, later, new: {
        "mean": zeros(saved),
        "square": zeros(saved),
    },
    "Adam's first moments begin at 0 again": lambda saved, later, new: {"mean": zeros(saved)},
    "Adam's second moments begin at 0 again": lambda saved, later, new: {"square": zeros(saved)},
    "the first moments are taken for the second, too": lambda saved, later, new: {
        "square": copy.deepcopy(saved.mean)
    },
    "the second moments are taken for the first, too": lambda saved, later, new: {
        "mean": copy.deepcopy(saved.square)
    },
    "first and second moments are exchanged": lambda saved, later, new: {
        "mean": saved.square,
        "square": saved.mean,
    },
    "weights and moments have the same names, so the second moments overwrite the others": lambda saved, later, new: {
        "weights": copy.deepcopy(saved.square),
        "mean": copy.deepcopy(saved.square),
    },
    "the generator is made anew, from a seed": lambda saved, later, new: {
        "generator": np.random.default_rng(0)
    },
    "the generator is made anew, from the number of steps": lambda saved, later, new: {
        "generator": np.random.default_rng(saved.step)
    },
    "the generator is made anew, from the run's first seed": lambda saved, later, new: {
        "generator": np.random.default_rng(later.seed)
    },
}


def went_on(
    facts: Sequence[int],
    number: int,
    other: Callable[[Training, Training, Training], dict[str, object]],
) -> Array:
    """Return the losses of a run that goes on from what was saved, but for what it has of another
    instead.

    `other` is given the saved run, the same after its next steps, and the new one, of this
    `number`, to be restored.
    """
    before, after, seed = facts
    run = Training(seed)
    for _ in range(before):
        run.take_step()
    saved, losses = copy.deepcopy(run), [run.take_step() for _ in range(after)]
    vars(saved).update(other(saved, run, Training(number)))
    with np.errstate(all="ignore"):
        return np.array([saved.take_step() for _ in losses])


NAMES = ("training", "writing", "lost")


def judge_answered(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Young's interval, and Daly's expectation."""
    times, ranks = case.given[0]["times"], case.given[0]["ranks"]
    young = np.sqrt(2 * times[:, 1] * times[:, 2])
    instead = {
        "the failures of one rank are counted, not of all": young * np.sqrt(ranks),
        "the time between failures is multiplied by the ranks: more of them fail more often": young
        * ranks,
        "the square root is not taken": young**2,
        "a 2 is left out": young / 2**0.5,
        "it is the root of δ M / 2": young / 2,
        "it is the root of 4 δ M": young * 2**0.5,
        "it is the root of 2 δ / M": np.sqrt(2 * times[:, 1] / times[:, 2]),
        "it is the root of 2 M alone": np.sqrt(2 * times[:, 2]),
        "one rank less is counted": young * np.sqrt(ranks / np.maximum(1, ranks - 1)),
        "one rank more is counted": young * np.sqrt(ranks / (ranks + 1)),
        "the root is divided by the ranks; M is, inside of it": young / np.sqrt(ranks),
        "M is divided by the ranks twice": young / np.sqrt(ranks),
        "the time of writing is taken off, as in Daly's formula": young - times[:, 1],
        "the time of writing is added": young + times[:, 1],
        "it is M itself": times[:, 2],
    }
    expect_close(0, "interval of question", results[0]["intervals"], young, instead=instead)
    for column, name in enumerate(NAMES):
        wrongly = {clause: shares_by(times, whole)[:, column] for clause, whole in WHOLE.items()}
        right, wholes = shares_by(times, exact), np.array([exact(*each) for each in times.tolist()])
        expected, found = right[:, column], results[0]["shares"][:, column]
        wrongly |= {
            f"it is the share of {other}": right[:, i]
            for i, other in enumerate(NAMES)
            if i != column
        }
        of_all = (*times[:, :2].T, wholes - times[:, 0] - times[:, 1])
        wrongly |= {
            "seconds are returned, not shares": of_all[column],
            "it is a percentage, not a share": 100 * expected,
            "it is what it is of the time without failures": of_all[column]
            / (times[:, 0] + times[:, 1]),
            "restarts alone are counted, and not the work that is lost": times[:, 3] / wholes,
            "restarts are left out": 1 - right[:, 0] - right[:, 1] - times[:, 3] / wholes,
            "it is one less training; writing is not work that is lost": 1 - right[:, 0],
            "it is one over the share": 1 / expected,
        }
        expect_close(0, f"{name} of question", found, expected, instead=wrongly)


def exact(compute: float, write: float, mtbf: float, restart: float) -> float:
    """Return how long an interval takes on average."""
    return mtbf * exp(restart / mtbf) * expm1((compute + write) / mtbf)


def rule_of_thumb(compute: float, write: float, mtbf: float, restart: float) -> float:
    """Return the same to first order."""
    return (compute + write) * (1 + ((compute + write) / 2 + restart) / mtbf)


Whole = Callable[[float, float, float, float], float]
WHOLE: dict[str, Whole] = {
    "the time to start again is left out": lambda compute, write, mtbf, restart: exact(
        compute, write, mtbf, 0
    ),
    "each interval has one restart": lambda compute, write, mtbf, restart: (
        exact(compute, write, mtbf, 0) + restart
    ),
    "nothing fails while a checkpoint is written": lambda compute, write, mtbf, restart: exact(
        compute, 0, mtbf, restart
    ),
    "a restart multiplies by e^(-R/M), not by e^(R/M)": lambda compute, write, mtbf, restart: exact(
        compute, write, mtbf, -restart
    ),
    "1 is not subtracted from e^((compute + write)/M)": lambda compute, write, mtbf, restart: (
        mtbf * exp((restart + compute + write) / mtbf)
    ),
    "whole is not multiplied by M": lambda compute, write, mtbf, restart: (
        exact(compute, write, mtbf, restart) / mtbf
    ),
    "nothing is computed that can fail": lambda compute, write, mtbf, restart: exact(
        0, write, mtbf, restart
    ),
    "the restart belongs to the interval, in the same exponent": lambda compute, write, mtbf, restart: (
        exact(compute, write + restart, mtbf, 0)
    ),
    "times are simply added: compute, write and a restart": lambda compute, write, mtbf, restart: (
        compute + write + restart
    ),
    "nothing fails": lambda compute, write, mtbf, restart: compute + write,
    "the writing is left out": lambda compute, write, mtbf, restart: exact(compute, 0, mtbf, 0),
    "a failure costs half an interval and a restart, which is the rule of thumb": rule_of_thumb,
}


def shares_by(times: Array, whole: Whole) -> Array:
    """Return the three shares of each question [question, share] if an interval takes `whole`
    seconds.
    """
    parts = [(each[0] / whole(*each), each[1] / whole(*each)) for each in times.tolist()]
    return np.array([(training, writing, 1 - training - writing) for training, writing in parts])
