"""Lesson 02, task 4: the program that runs beside an answer, and its judge."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

from judges import lengths

from minidist import Communicator
from minidist.course.grader.contract import (
    Arrays,
    Case,
    Note,
    Wrong,
    known,
)


def cost(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 4."""
    return {
        "costs": [exercise.all_reduce_cost(*map(int, question)) for question in given["questions"]]
    }


def judge_cost(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The counts that `expect_ring` demands of task 3. Of several mistakes that fit, the one that
    fits most often.
    """
    told = list(zip(case.given[0]["questions"].tolist(), results[0]["costs"].tolist(), strict=True))
    fits = Counter(
        story
        for question, answer in told
        for wrong, found in zip(cost_mistakes(*question)[1:], (answer, *answer), strict=True)
        for story, value in wrong.items()
        if value == found
    )
    for question, answer in told:
        expected, *tables = cost_mistakes(*question)
        for wrong, found, right in zip(
            tables, (answer, *answer), (expected, *expected), strict=True
        ):
            likely = {
                story: wrong[story] for story in sorted(wrong, key=lambda story: -fits[story])
            }
            story = known(likely, partial(operator.eq, found)) if found != right else ""
            if story or (answer != expected and wrong is tables[-1]):
                raise Wrong(
                    f"all_reduce_cost{tuple(question)} is {answer}, expected {expected}{story}"
                )


Table = dict[str, Any]


def cost_mistakes(
    elements: int, itemsize: int, ranks: int, rank: int
) -> tuple[list[int], Table, Table, Table]:
    """Return (messages, bytes), and what comes out by mistake: of both together, of messages, and
    of bytes.
    """
    chunks, messages = lengths(elements, ranks), 2 * (ranks - 1)
    own, left, right = (chunks[at % ranks] for at in (rank, rank - 1, rank + 1))
    empty = sum(
        not chunks[i] for turn in (rank, rank + 1) for i in range(ranks) if i != turn % ranks
    )
    expected = [messages, (2 * elements - own - right) * itemsize]
    whole = {
        "the all-gather is left out": [messages // 2, (elements - own) * itemsize],
        "messages of length 0 are not counted": [messages - empty, expected[1]],
        "the messages of all ranks are counted, not those of one": [
            messages * ranks,
            messages * elements * itemsize,
        ],
    }
    of_messages = {
        "the all-gather is left out": ranks - 1,
        "each half takes P steps, not P - 1": 2 * ranks,
        "there are P messages": ranks,
        "only one of the halves takes P - 1 steps": 2 * ranks - 1,
        "every rank's messages are counted": messages * ranks,
    }
    last, longest, least = chunks[::-1], -(-elements // ranks), elements // ranks
    rest = [least] * (ranks - 1) + [elements - least * (ranks - 1)]
    of_bytes = {
        "the all-gather is left out": (elements - own) * itemsize,
        "a rank alone sends its buffer as well": elements * itemsize if ranks == 1 else None,
        "a rank never sends its own chunk in the all-gather either": 2
        * (elements - own)
        * itemsize,
        "its right neighbour's chunk is left out in both halves": 2 * (elements - right) * itemsize,
        "the left neighbour's chunk is left out": (2 * elements - own - left) * itemsize,
        "2 (P - 1)/P of the bytes is taken where P does not divide the length": (
            messages * elements * itemsize // ranks
        ),
        "2 (P - 1)/P of the bytes is taken, and not rounded": messages
        * elements
        * itemsize
        / ranks,
        "all chunks are as long as the longest": messages * longest * itemsize,
        "the elements that P does not divide are left out": messages * least * itemsize,
        "the longer chunks are the last ones": (
            2 * elements - last[rank] - last[(rank + 1) % ranks]
        )
        * itemsize,
        "the last chunk takes the whole remainder": (
            2 * elements - rest[rank] - rest[(rank + 1) % ranks]
        )
        * itemsize,
        "whole buffers are sent, not chunks": messages * elements * itemsize,
        "both halves send every chunk": 2 * elements * itemsize,
        "the bytes of all ranks are added up": messages * elements * itemsize,
        "elements are counted instead of bytes": 2 * elements - own - right,
        "a byte has 8 of the units that are counted: bits": expected[1] * 8,
    }
    return expected, whole, of_messages, of_bytes
