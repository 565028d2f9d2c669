"""Lesson 15, tasks 2 and 3: the judges of what the checks' programs found, in the grader's
process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import load as load_safetensors

from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong, expect_equal, known

NEW, OLD = "step-00000005", "step-00000003"
LEFT = b"of an earlier run"
FLAWS = (
    "",
    "of which one element is missing",
    "of which one element is stored twice",
    "of which a piece lies one further, so one element is missing and one twice",
    "which is not stored",
    "of which the last element is missing",
    "of which a piece goes on behind the last element",
    "of which the first element is missing",
)


def judge_saved(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """What a crash would have found at every moment, then what is there at the end."""
    told = [json.loads(result["seen"].tobytes()) for result in results]
    end, flushed = told[0]["end"], {}
    if case.given[0]["facts"][2]:
        if not any(name.startswith(OLD) for name in end):
            raise Wrong(f"the earlier checkpoint {OLD} is gone")
        for rank, one in enumerate(told):
            if [text for name, (_, text) in one["end"].items() if name.startswith(NEW)] != [
                LEFT.hex()
            ]:
                raise Wrong(
                    f"there was a checkpoint {NEW} already, which the second save of this step "
                    "overwrites"
                )
            if (raised := one["refused"] or "nothing") != "FileExistsError":
                raise Wrong(
                    f"rank {rank}: a checkpoint {NEW} was there already: expected "
                    f"FileExistsError, found {raised}"
                )
        return
    new = {name: text for name, text in end.items() if name.startswith(NEW)}
    for name, (_, text) in new.items():
        if text == LEFT.hex():
            raise Wrong(
                f"{name} is of an earlier run: what a killed run left must not get into the new "
                "checkpoint"
            )
    for moment in sorted(
        (moment for one in told for moment in one["log"]), key=lambda moment: moment["time"]
    ):
        files, where = moment["files"], f"at line {moment['line']}"
        there = {name: text for name, text in files.items() if name.startswith(NEW)}
        if not any(name.startswith(OLD) for name in files):
            raise Wrong(f"{where} the earlier checkpoint {OLD} is gone: a crash there loses both")
        if there and there != new:
            lacks = sorted(name for name in {*new, *there} if there.get(name) != new.get(name))
            raise Wrong(
                f"{where} there is a folder {NEW} which is not complete: see {', '.join(lacks)}"
            )
        for name, (number, text) in there.items():
            if (then := flushed.get(number)) != text:
                says = (
                    f"{where} {name} is renamed into place, but not flushed: os.fsync was not "
                    "called for it"
                )
                if then is not None:
                    half = f"when it had {len(then) // 2} of its {len(text) // 2} bytes"
                    says = (
                        f"{where} {name} is renamed, but os.fsync was called {half}; the rest was "
                        "in Python's buffer"
                    )
                raise Wrong(says)
        if moment["flush"]:
            flushed |= {
                number: text for number, text in files.values() if number == moment["flush"]
            }
    for rank, one in enumerate(told):
        others = {name.partition("/")[0] for name in one["end"]} - {OLD, NEW}
        if named := sorted(name for name in others if name.startswith("step-")):
            raise Wrong(
                f"rank {rank}: the folder is called {named[0]}, expected {NEW}: eight digits of "
                "step 5"
            )
        if not any(name.startswith(NEW) for name in one["end"]):
            raise Wrong(
                f"rank {rank} returns before there is {NEW}: it has to wait for the one that "
                "renames it"
            )
        left = sorted({name.partition("/")[0] for name in one["end"]} - {OLD, NEW})
        if left:
            raise Wrong(
                f"when rank {rank} returns, {', '.join(left)} is still there: remove what killed "
                "runs left"
            )
        if one["end"] != end or {name.partition("/")[0] for name in end} != {OLD, NEW}:
            raise Wrong(
                f"when rank {rank} returns there is {', '.join(one['end'])}, expected {OLD} and "
                f"{NEW} complete"
            )
    judge_files(
        case, {name.removeprefix(NEW + "/"): bytes.fromhex(text) for name, (_, text) in new.items()}
    )


def judge_files(case: Case, raw: Mapping[str, bytes]) -> None:
    """Every rank's own piece in its own file, and an index that tells where they are."""
    expected = []
    for rank, given in enumerate(case.given):
        file, start, mine = f"rank-{rank:04d}.safetensors", int(given["start"]), given["w"]
        if len(mine) and (file not in raw or "index.json" not in raw or "state.json" not in raw):
            lacks = next(name for name in (file, "index.json", "state.json") if name not in raw)
            raise Wrong(
                f"the checkpoint has {', '.join(sorted(raw))}, and no {lacks}: it was never "
                "written, or elsewhere, or removed by a rank that clears what killed runs left "
                "while another writes already"
            )
        if len(mine):
            expect_equal(rank, f"w in {file}", load_safetensors(raw[file])["w"], mine)
            expected.append({"file": file, "block": [0, 0], "elements": [start, start + len(mine)]})
    found, size = json.loads(raw["index.json"])["tensors"]["w"], int(case.given[0]["facts"][0])
    entry = {"dtype": "float64", "shape": [size], "dim": None, "pieces": expected}
    if {**found, "pieces": sorted(found["pieces"], key=lambda piece: piece["file"])} != entry:
        says = f"index.json says of w {json.dumps(found)}, expected {json.dumps(entry)}"
        raise Wrong(says + (misindexed(found, entry) if isinstance(found, dict) else ""))
    if json.loads(raw["state.json"]) != {"step": 5, "loss": 1.5}:
        told = json.loads(raw["state.json"])
        ways = {
            "the step is left out": {"loss": 1.5},
            "the state is left out": {"step": 5},
            "the state is in a dictionary of its own, not beside the step": [
                {"step": 5, name: {"loss": 1.5}}
                for name in (told if isinstance(told, dict) else ())
            ],
            "the step is text, not a number": [
                {"step": step, "loss": 1.5} for step in ("5", "00000005")
            ],
        }
        hint = known(ways, lambda way: told in way if isinstance(way, list) else told == way)
        raise Wrong(
            f"state.json does not hold the step and the state: it is {json.dumps(told)[:200]}{hint}"
        )


def misindexed(found: dict[str, Any], entry: dict[str, Any]) -> str:
    """Say what is wrong with an entry of the index, in words that go behind the rejection, or
    nothing.
    """
    if lacking := [key for key in entry if key not in found]:
        return f": {', '.join(lacking)} is left out"
    if different := [key for key in ("dtype", "shape", "dim") if found[key] != entry[key]]:
        key, sizes = (
            different[0],
            [piece["elements"][1] - piece["elements"][0] for piece in entry["pieces"]],
        )
        ways = {
            "dtype is torch's name; it is without `torch.`": str(found["dtype"]).startswith(
                "torch."
            ),
            "shape is that of a rank's piece; it is that of the whole tensor": found["shape"]
            in [[n] for n in sizes],
            f"{key} is another": True,
        }
        return known(ways, bool)
    pieces = found["pieces"]
    if not isinstance(pieces, list) or not all(isinstance(piece, dict) for piece in pieces):
        return ": pieces is a list of dictionaries"
    if any(set(piece) != {"file", "block", "elements"} for piece in pieces):
        return ": each piece has file, block and elements, and nothing else"

    def elements(change: Callable[[int, int], list[int]]) -> list[list[int]]:
        return [change(*piece["elements"]) for piece in entry["pieces"]]

    mine = [piece["elements"] for piece in sorted(pieces, key=lambda piece: piece["file"])]
    ways = {
        "pieces of other ranks are left out: rank 0 has to be told what all have written": len(mine)
        < len(entry["pieces"]),
        "ranks that have nothing are there, too": len(mine) > len(entry["pieces"]),
        "elements are numbered within each file, not in the whole tensor": mine
        == elements(lambda a, b: [0, b - a]),
        "elements are (start, how many), not (start, stop)": mine
        == elements(lambda a, b: [a, b - a]),
        "stop is the last element; it is the one after it": mine
        == elements(lambda a, b: [a, b - 1]),
        "files have other names": {p["file"] for p in pieces}
        != {p["file"] for p in entry["pieces"]},
        "block is another; it is [0, 0]": any(piece["block"] != [0, 0] for piece in pieces),
    }
    return known(ways, bool)


def judge_loaded(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The right elements, each read once, a piece at most once; or a refusal before anything is
    read.
    """
    for rank, (given, result) in enumerate(zip(case.given, results, strict=True)):
        (start, stop), flaw = given["wanted"].tolist(), FLAWS[int(given["flaw"])]
        reads = [read for read in result["reads"].reshape(-1, 3).tolist() if read[1] < read[2]]
        if flaw and result["refused"] != 1:
            what = "a KeyError was raised" if result["refused"] else "load returned"
            raise Wrong(
                f"rank {rank} wants {start} to {stop} of w, {flaw}: {what}, expected a ValueError"
            )
        if flaw and reads:
            raise Wrong(
                f"rank {rank}: {len(reads)} reads before the ValueError: look at all tensors "
                "before the first"
            )
        if not flaw and result["refused"]:
            raise Wrong(
                f"rank {rank}: refused, though each element of a and w is there exactly once"
            )
        if not flaw:
            for piece, first, last in (read for read in reads if read[0] >= 0):
                if last > (size := np.diff(given["parts"][piece, :2]).item()):
                    says = (
                        f"rank {rank} reads elements {first} to {last} of a piece which has {size}"
                    )
                    raise Wrong(
                        f"{says}: they are numbered within the piece, not in the whole tensor"
                    )
            for name, whole, first, last, pieces in (
                ("a", np.arange(6.0), 1, 4, [[0, 6]]),
                ("w", given["whole"], start, stop, given["parts"][:, :2].tolist()),
            ):
                right, instead = whole[first:last], misread(whole, first, last, pieces)
                expect_equal(
                    rank,
                    f"element of {name} from {first} to {last}: found",
                    result[name],
                    right,
                    instead=instead,
                )
            if len(reads) != len({read[0] for read in reads}):
                raise Wrong(
                    f"rank {rank} reads a piece more than once: (piece, first, last) are {reads}"
                )
            if sum(b - a for _, a, b in reads) != stop - start + 3:
                sizes = {-1: 6} | {
                    piece: int(b - a) for piece, (a, b, _) in enumerate(given["parts"])
                }
                whole = [read for read in reads if read[1:] == [0, sizes[read[0]]]]
                why = ": whole pieces are read, of which a part is wanted" if whole == reads else ""
                words = f"rank {rank} wants {stop - start + 3} elements and reads others"
                raise Wrong(f"{words}: (piece, first, last) {reads}{why}")


def misread(
    whole: Array, start: int, stop: int, pieces: Sequence[Sequence[int]]
) -> dict[str, Array]:
    """Return what known mistakes find of the elements from `start` to `stop`."""
    ordered = sorted(map(tuple, pieces))

    def joined(some: Sequence[Sequence[int]], take: Callable[[int, int], Array]) -> Array:
        return np.concatenate(
            [np.empty(0), *(take(a, b) for a, b in some if a < stop and b > start)]
        )

    def right(a: int, b: int) -> Array:
        return whole[max(a, start) : min(b, stop)]

    def within(
        first: Callable[[int, int], int], last: Callable[[int, int], int]
    ) -> Callable[[int, int], Array]:
        return lambda a, b: whole[a:b][max(0, first(a, b)) : max(0, last(a, b))]

    def begin(a: int, b: int) -> int:
        return max(a, start) - a

    def end(a: int, b: int) -> int:
        return min(b, stop) - a

    return {
        "pieces are joined in the order of the index": joined(pieces, right),
        "pieces are joined from last to first": joined(ordered[::-1], right),
        "elements of a piece are numbered as in the whole tensor": joined(
            ordered, within(lambda a, b: begin(a, b) + a, lambda a, b: end(a, b) + a)
        ),
        "the last element of each piece is left out: `last` is the one after it": joined(
            ordered, within(begin, lambda a, b: end(a, b) - 1)
        ),
        "one element too many is read of each piece": joined(
            ordered, within(begin, lambda a, b: end(a, b) + 1)
        ),
        "each piece is read from its beginning": joined(
            ordered, within(lambda a, b: 0, lambda a, b: end(a, b) - begin(a, b))
        ),
        "each piece is read to its end": joined(ordered, within(begin, lambda a, b: b - a)),
        "whole pieces are returned, not only what is wanted of them": joined(
            ordered, lambda a, b: whole[a:b]
        ),
        "pieces that are wanted only in part are left out": joined(
            ordered, lambda a, b: whole[a:b] if start <= a and b <= stop else np.empty(0)
        ),
        "only the first piece that is wanted is read": joined(
            [piece for piece in ordered if piece[0] < stop and piece[1] > start][:1], right
        ),
        "all elements are returned, not only those that are wanted": whole,
        "they are rounded to float32": whole[start:stop].astype(np.float32),
    }
