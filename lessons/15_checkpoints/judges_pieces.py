"""Lesson 15, task 1: the judge of who writes what."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minidist.course.grader.contract import Arrays, Case, Note, Wrong, known


def judge_dealt(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each element once, by a rank that holds it."""
    dp, tp = case.given[0]["sizes"].tolist()
    rows = case.given[0]["tensors"].tolist()
    told = [
        {row[0]: row[1:] for row in result["found"].reshape(-1, 3).tolist()} for result in results
    ]
    for number, (n, m, cut, sliced) in enumerate(rows):
        writers: list[list[int]] = [[] for _ in range(n * m)]
        what = f"of a tensor ({n}, {m}), cut={bool(cut)}, sliced={bool(sliced)},"
        for rank, pieces in enumerate(told):
            block = np.split(np.arange(n * m), tp)[rank % tp] if cut else np.arange(n * m)
            mine = np.array_split(block, dp)[rank // tp] if sliced else block
            if number in pieces:
                start, stop = pieces[number]
                if start >= stop or not np.isin(np.arange(start, stop), mine).all():
                    says = f"{what} rank {rank} writes {start} to {stop}, but holds {mine.tolist()}"
                    plain = ": what a rank writes nothing of is left out" if start >= stop else ""
                    raise Wrong(says + (misdealt(told, number, rows[number], dp, tp) or plain))
                for element in range(start, stop):
                    writers[element].append(rank)
        for element, ranks in enumerate(writers):
            if len(ranks) != 1:
                says = (
                    f"by ranks {ranks}, expected by one of those that hold it"
                    if ranks
                    else "by no rank"
                )
                raise Wrong(
                    f"{what} element {element} is written "
                    f"{says}{misdealt(told, number, rows[number], dp, tp)}"
                )


def misdealt(
    told: Sequence[dict[int, list[int]]], number: int, row: Sequence[int], dp: int, tp: int
) -> str:
    """Return which mistakes make all ranks write just this of a tensor, or
    nothing.
    """
    found = [pieces.get(number) for pieces in told]
    ways = {
        clause: [piece_by(row, dp, tp, rank, how) for rank in range(dp * tp)]
        for how, clause in DEALT.items()
    }
    return known(ways, found.__eq__)


DEALT = {
    "every dp": "what all of dp hold is written by each of them; one is enough",
    "every tp": "what all of tp hold is written by each of them; one is enough",
    "every rank": "each rank writes all that it holds; of those that hold the same one is enough",
    "cut by one": "what is cut along tp is written by tp rank 0 alone, and what is not by all; it is the "
    "reverse",
    "sliced by one": "what is sliced is written by dp rank 0 alone, and what is not by all; it is the reverse",
    "rank 0 alone": "rank 0 alone writes what is not sliced, also of what is cut along tp",
    "whole": "a cut tensor is taken for whole: its block is 1/tp of it",
    "of the block": "elements are numbered from the beginning of the block",
    "no place in tp": "the blocks of all tp ranks begin at 0",
    "rounded up": "slices have n/dp elements, rounded up, and the last one what is left",
    "last takes all": "the last slice takes all of the remainder",
    "rounded down": "a slice begins where it would if all earlier ones had n/dp elements, rounded down",
    "left over": "slices have n/dp elements, rounded down, and the rest is left out",
    "last longer": "the last slices are longer by one; the first ones are",
    "no slices": "a rank writes the whole block, and not its slice",
    "rows": "rows are counted, not elements",
    "columns": "columns are counted, not elements",
    "inclusive": "stop is the last element; it is the one after it",
    "length": "the second number is how many elements there are, not where they stop",
    "exchanged": "the places along dp and tp are exchanged",
    "slices of all": "slices are cut for all ranks of the mesh, not for those of dp",
    "empty": "what a rank writes nothing of is there, too",
    "sliced first": "the whole tensor is sliced over dp, and then its slice cut along tp",
}


def piece_by(row: Sequence[int], dp: int, tp: int, rank: int, how: str = "") -> list[int] | None:
    """Return (start, stop) of what a rank writes of a tensor (rows, columns, cut, sliced); `how` is
    one of `DEALT`.
    """
    n, m, cut, sliced = row
    along_dp, along_tp = rank // tp, rank % tp
    if how == "exchanged":
        along_dp, along_tp = along_tp, along_dp
    by_one_tp, by_one_dp = not cut, not sliced
    by_one_tp = {"every tp": False, "every rank": False, "cut by one": bool(cut)}.get(
        how, by_one_tp
    )
    by_one_dp = {"every dp": False, "every rank": False, "sliced by one": bool(sliced)}.get(
        how, by_one_dp
    )
    if (
        (by_one_tp and along_tp)
        or (by_one_dp and along_dp)
        or (how == "rank 0 alone" and not sliced and rank)
    ):
        return None
    count = {"rows": n, "columns": m}.get(how, n * m) // (tp if cut and how != "whole" else 1)
    begin = (
        count * along_tp if cut and how not in ("whole", "of the block", "no place in tp") else 0
    )
    start, stop = 0, count
    if sliced and how != "no slices":
        parts = dp * tp if how == "slices of all" else dp
        place = rank if how == "slices of all" else along_dp
        length, longer = divmod(count, parts)
        start = place * length + min(place, longer)
        stop = start + length + (place < longer)
        up = -(-count // parts)
        ways = {
            "rounded up": (min(place * up, count), min(place * up + up, count)),
            "last takes all": (
                place * length,
                count if place == parts - 1 else place * length + length,
            ),
            "rounded down": (place * length, place * length + stop - start),
            "left over": (place * length, place * length + length),
            "last longer": (
                place * length + max(0, place - parts + longer),
                (place + 1) * length + max(0, place + 1 - parts + longer),
            ),
        }
        start, stop = ways.get(how, (start, stop))
    if start >= stop and how != "empty":
        return None
    second = {"inclusive": stop - 1, "length": stop - start - begin}.get(how, stop)
    return [begin + start, begin + second]
