"""Lesson 05, task 1: the program that asks what fits, and its judge."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from math import ceil, floor
from types import ModuleType
from typing import Any

from judges import BYTES

from minidist import Communicator
from minidist.course.grader.contract import Arrays, Case, Note, Wrong, known

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
            "there is a master copy in 32 bits, which this recipe does not have": (
                (each[0], each[1], 12),
                stage,
            ),
            "the master copy is forgotten": ((each[0], each[1], each[2] - 4), stage),
            "the master copy counts among the parameters, which are cut in stage 3 alone; it is "
            "optimizer state": (
                (each[0] + 4, each[1], each[2] - 4) if name != "float32" else each,
                stage,
            ),
            "the moments take 4 bytes each": ((each[0], each[1], 12), stage),
            "it is always the text's recipe": (BYTES["mixed"], stage),
            "gradients are not counted": ((each[0], 0, each[2]), stage),
            "parameters are not counted": ((0, each[1], each[2]), stage),
            "optimizer state is not counted": ((each[0], each[1], 0), stage),
            "only one moment is counted, and there are two": (
                (each[0], each[1], each[2] - moment(name)),
                stage,
            ),
            "gradients take 4 bytes each": ((each[0], 4, each[2]), stage),
            "parameters take 4 bytes each": ((4, each[1], each[2]), stage),
            **{
                f"it is counted as in stage {other}": (each, other)
                for other in range(4)
                if abs(other - stage) > 1
            },
        }
        total = sum(each)
        sizes = {
            "memory of all ranks is one, so that nothing is held twice": memory * ranks // total,
            "a GB is taken for 2**30 bytes": fitting(memory * 2**30 // 10**9, ranks, each, stage),
            "there is one rank more": fitting(memory, ranks + 1, each, stage),
            "what is cut is divided by P - 1": fitting(memory, max(1, ranks - 1), each, stage),
        }
        fits = partial(fitting, memory, ranks)
        if (
            not fits(each, stage, Fraction(-1, 10**12))
            <= size
            <= fits(each, stage, Fraction(1, 10**12))
        ):
            right = fits(each, stage)
            found = sizes | {how: fits(*other) for how, other in wrong.items()}
            story = known(found, lambda other, size=size: abs(other - size) <= 1).removeprefix(": ")
            story = "so many do not fit, round down" if size == right + 1 else story
            question = f"largest_model({memory}, {ranks}, {stage}, {name!r})"
            raise Wrong(f"{question} is {size}, expected {right}" + f": {story}" * bool(story))
        enough = partial(needed, parameters, memory)
        close = {enough(each, stage, Fraction(sign, 10**12)) for sign in (-1, 0, 1)}
        if many not in close:
            right = enough(each, stage)
            counts = {how: enough(*other) for how, other in wrong.items()}
            counts["all is cut, whatever the stage is"] = -(-parameters * total // memory)
            counts["the number of ranks is rounded up to a power of two"] = (
                1 << max(0, right - 1).bit_length()
            )
            story = known(counts, partial(operator.eq, many)).removeprefix(": ")
            none = "what is not cut leaves no room on any number of ranks"
            none += ", which is None and not 0" * (many == 0) + f": {story}" * bool(
                many > 0 and story
            )
            story = none if right < 0 else story
            story = (
                "with one rank less it does not fit: round up" if 0 <= many == right - 1 else story
            )
            said = [None if each < 0 else each for each in (many, right)]
            question = f"fewest_ranks({parameters}, {memory}, {stage}, {name!r})"
            raise Wrong(f"{question} is {said[0]}, expected {said[1]}" + f": {story}" * bool(story))


def moment(recipe: str) -> int:
    """Return the bytes of one of the two moments."""
    return 1 if recipe == "8-bit moments" else 4


def whole_and_cut(each: tuple[int, ...], stage: int) -> tuple[int, int]:
    """Return the bytes of a parameter that every rank holds, and those that are divided."""
    cut = sum(bytes for bytes, first in zip(each, (3, 2, 1), strict=True) if stage >= first)
    return sum(each) - cut, cut


def fitting(
    memory: int, ranks: int, each: tuple[int, ...], stage: int, more: Fraction = Fraction(0)
) -> int:
    """Return how many parameters fit, into a little `more` memory perhaps."""
    whole, cut = whole_and_cut(each, stage)
    return floor(memory * (1 + more) / (whole + Fraction(cut, ranks)))


def needed(
    parameters: int, memory: int, each: tuple[int, ...], stage: int, more: Fraction = Fraction(0)
) -> int:
    """Return how many ranks are enough, -1 if none are."""
    whole, cut = whole_and_cut(each, stage)
    left = memory * (1 + more) - parameters * whole
    if left < 0 or (cut and left == 0):
        return -1
    return max(1, ceil(parameters * cut / left)) if cut else 1
