"""Lesson 05, task 1: the program that asks what fits, and its judge."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from math import ceil, floor
from types import ModuleType
from typing import Any

from judges import BYTES

from minidist import Communicator
from minidist.course.grader.contract import Arrays, Case, Note, Wrong

RECIPES = tuple(BYTES)


def equation(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1. Where no number of ranks is enough, the answer is noted as -1."""
    sizes, fewest = [], []
    for parameters, memory, ranks, stage, recipe in given["questions"].tolist():
        sizes.append(exercise.largest_model(memory, ranks, stage, RECIPES[recipe]))
        found = exercise.fewest_ranks(parameters, memory, stage, RECIPES[recipe])
        fewest.append(-1 if found is None else found)
    return {"sizes": sizes, "fewest": fewest}


def judge_equation(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """What fits, and into how many: in whole numbers, but for the last bit of a float."""
    asked = case.given[0]["questions"].tolist()
    answers = (results[0][name].tolist() for name in ("sizes", "fewest"))
    for (parameters, memory, ranks, stage, recipe), size, many in zip(asked, *answers, strict=True):
        each, name = BYTES[RECIPES[recipe]], RECIPES[recipe]
        wrong = {
            "the next stage is taken": (each, stage + 1),
            "the stage before is taken": (each, stage - 1),
            "everything is cut from stage 1 on": (each, 3 if stage else 0),
            "there is a master copy in 32 bits, which this recipe does not have": ((each[0], each[1], 12), stage),
            "the master copy is forgotten": ((each[0], each[1], each[2] - 4), stage),
            "the moments take 4 bytes each": ((each[0], each[1], 12), stage),
            "it is always the text's recipe": (BYTES["mixed"], stage),
        }
        fits = partial(fitting, memory, ranks)
        if not fits(each, stage, Fraction(-1, 10**12)) <= size <= fits(each, stage, Fraction(1, 10**12)):
            right = fits(each, stage)
            story = next((how for how, other in wrong.items() if abs(fits(*other) - size) <= 1), "")
            story = f"this is what comes out if {story}" if story else ""
            story = "so many do not fit, round down" if size == right + 1 else story
            question = f"largest_model({memory}, {ranks}, {stage}, {name!r})"
            raise Wrong(f"{question} is {size}, expected {right}" + f": {story}" * bool(story))
        enough = partial(needed, parameters, memory)
        close = {enough(each, stage, Fraction(sign, 10**12)) for sign in (-1, 0, 1)}
        if many not in close:
            right = enough(each, stage)
            story = next((how for how, other in wrong.items() if enough(*other) == many), "")
            story = f"this is what comes out if {story}" if story else ""
            story = "what is not cut leaves no room on any number of ranks" if right < 0 else story
            story = "with one rank less it does not fit: round up" if 0 <= many == right - 1 else story
            said = [None if each < 0 else each for each in (many, right)]
            question = f"fewest_ranks({parameters}, {memory}, {stage}, {name!r})"
            raise Wrong(f"{question} is {said[0]}, expected {said[1]}" + f": {story}" * bool(story))


def whole_and_cut(each: tuple[int, ...], stage: int) -> tuple[int, int]:
    """Return the bytes of a parameter that every rank holds, and those that are divided."""
    cut = sum(bytes for bytes, first in zip(each, (3, 2, 1), strict=True) if stage >= first)
    return sum(each) - cut, cut


def fitting(memory: int, ranks: int, each: tuple[int, ...], stage: int, more: Fraction = Fraction(0)) -> int:
    """Return how many parameters fit, into a little `more` memory perhaps."""
    whole, cut = whole_and_cut(each, stage)
    return floor(memory * (1 + more) / (whole + Fraction(cut, ranks)))


def needed(parameters: int, memory: int, each: tuple[int, ...], stage: int, more: Fraction = Fraction(0)) -> int:
    """Return how many ranks are enough, -1 if none are."""
    whole, cut = whole_and_cut(each, stage)
    left = memory * (1 + more) - parameters * whole
    if left < 0 or (cut and left == 0):
        return -1
    return max(1, ceil(parameters * cut / left)) if cut else 1
