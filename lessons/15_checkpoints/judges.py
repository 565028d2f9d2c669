"""Lesson 15: the judges of what the checks' programs found, in the grader's process."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import exp, expm1

import numpy as np
from safetensors.numpy import load as load_safetensors

from minidist.course.grader.contract import Array, Arrays, Case, Note, Wrong, expect_close, expect_equal, known

NEW, OLD = "step-00000005", "step-00000003"
LEFT = b"of an earlier run"
FLAWS = (
    "",
    "of which one element is missing",
    "of which one element is stored twice",
    "of which a piece lies one further, so one element is missing and one twice",
    "which is not stored",
)


class Training:
    """Task 4's run: a regression with dropout on 7 rows, two a step."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
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
        error = (x * self.weights["w"]).sum(1) - rows  # no matrix product: its bits depend on where arrays lie
        gradient = (x * error[:, None]).sum(0)
        self.mean["w"] += 0.1 * (gradient - self.mean["w"])
        self.square["w"] += 0.01 * (gradient**2 - self.square["w"])
        self.weights["w"] -= 0.1 * self.mean["w"] / (1 - 0.9**self.step) / np.sqrt(self.square["w"])
        return float((error**2).sum())


def judge_dealt(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each element once, by a rank that holds it."""
    dp, tp = case.given[0]["sizes"].tolist()
    for number, (n, m, cut, sliced) in enumerate(case.given[0]["tensors"].tolist()):
        writers: list[list[int]] = [[] for _ in range(n * m)]
        what = f"of a tensor ({n}, {m}), cut={bool(cut)}, sliced={bool(sliced)},"
        for rank, result in enumerate(results):
            block = np.split(np.arange(n * m), tp)[rank % tp] if cut else np.arange(n * m)
            mine = np.array_split(block, dp)[rank // tp] if sliced else block
            for _, start, stop in (row for row in result["found"].reshape(-1, 3).tolist() if row[0] == number):
                if start >= stop or not np.isin(np.arange(start, stop), mine).all():
                    says = f"{what} rank {rank} writes {start} to {stop}, but holds {mine.tolist()}"
                    why = known(other_pieces(block, mine, dp, rank // tp), [*range(start, stop)].__eq__)
                    raise Wrong(says + (why if start < stop else ": what a rank writes nothing of is left out"))
                for element in range(start, stop):
                    writers[element].append(rank)
        for element, ranks in enumerate(writers):
            if len(ranks) != 1:
                says = f"by ranks {ranks}, expected by one of those that hold it" if ranks else "by no rank"
                raise Wrong(f"{what} element {element} is written {says}")


def other_pieces(block: Array, mine: Array, dp: int, place: int) -> dict[str, list[int]]:
    """Return the elements of rank `place` along dp if known mistakes are made with them."""
    whole, most = divmod(len(block), dp)[0], -(-len(block) // dp)
    return {
        "elements are numbered from the beginning of the block": (mine - block[0]).tolist(),
        "slices have n/dp elements, rounded up, and the last one what is left": block[place * most :][:most].tolist(),
        "the last slice takes all of the remainder": block[place * whole :][
            : whole if place < dp - 1 else None
        ].tolist(),
        "a slice begins where it would if all earlier ones had n/dp elements, rounded down": block[place * whole :][
            : len(mine)
        ].tolist(),
        "a rank writes the whole block, and not its slice": block.tolist(),
    }


def judge_saved(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """What a crash would have found at every moment, then what is there at the end."""
    told = [json.loads(result["seen"].tobytes()) for result in results]
    end, flushed = told[0]["end"], {}
    if case.given[0]["facts"][2]:
        if not any(name.startswith(OLD) for name in end):
            raise Wrong(f"the earlier checkpoint {OLD} is gone")
        for rank, one in enumerate(told):
            if [text for name, (_, text) in one["end"].items() if name.startswith(NEW)] != [LEFT.hex()]:
                raise Wrong(f"there was a checkpoint {NEW} already, which the second save of this step overwrites")
            if (raised := one["refused"] or "nothing") != "FileExistsError":
                raise Wrong(
                    f"rank {rank}: a checkpoint {NEW} was there already: expected FileExistsError, found {raised}"
                )
        return
    new = {name: text for name, text in end.items() if name.startswith(NEW)}
    for name, (_, text) in new.items():
        if text == LEFT.hex():
            raise Wrong(f"{name} is of an earlier run: what a killed run left must not get into the new checkpoint")
    for moment in sorted((moment for one in told for moment in one["log"]), key=lambda moment: moment["time"]):
        files, where = moment["files"], f"at line {moment['line']}"
        there = {name: text for name, text in files.items() if name.startswith(NEW)}
        if not any(name.startswith(OLD) for name in files):
            raise Wrong(f"{where} the earlier checkpoint {OLD} is gone: a crash there loses both")
        if there and there != new:
            lacks = sorted(name for name in {*new, *there} if there.get(name) != new.get(name))
            raise Wrong(f"{where} there is a folder {NEW} which is not complete: see {', '.join(lacks)}")
        for name, (number, text) in there.items():
            if (then := flushed.get(number)) != text:
                says = f"{where} {name} is renamed into place, but not flushed: os.fsync was not called for it"
                if then is not None:
                    half = f"when it had {len(then) // 2} of its {len(text) // 2} bytes"
                    says = f"{where} {name} is renamed, but os.fsync was called {half}; the rest was in Python's buffer"
                raise Wrong(says)
        if moment["flush"]:
            flushed |= {number: text for number, text in files.values() if number == moment["flush"]}
    for rank, one in enumerate(told):
        if not any(name.startswith(NEW) for name in one["end"]):
            raise Wrong(f"rank {rank} returns before there is {NEW}: it has to wait for the one that renames it")
        left = sorted({name.partition("/")[0] for name in one["end"]} - {OLD, NEW})
        if left:
            raise Wrong(f"when rank {rank} returns, {', '.join(left)} is still there: remove what killed runs left")
        if one["end"] != end or {name.partition("/")[0] for name in end} != {OLD, NEW}:
            raise Wrong(f"when rank {rank} returns there is {', '.join(one['end'])}, expected {OLD} and {NEW} complete")
    judge_files(case, {name.removeprefix(NEW + "/"): bytes.fromhex(text) for name, (_, text) in new.items()})


def judge_files(case: Case, raw: Mapping[str, bytes]) -> None:
    """Every rank's own piece in its own file, and an index that tells where they are."""
    expected = []
    for rank, given in enumerate(case.given):
        file, start, mine = f"rank-{rank:04d}.safetensors", int(given["start"]), given["w"]
        if len(mine):
            expect_equal(rank, f"w in {file}", load_safetensors(raw[file])["w"], mine)
            expected.append({"file": file, "block": [0, 0], "elements": [start, start + len(mine)]})
    found, size = json.loads(raw["index.json"])["tensors"]["w"], int(case.given[0]["facts"][0])
    entry = {"dtype": "float64", "shape": [size], "dim": None, "pieces": expected}
    if {**found, "pieces": sorted(found["pieces"], key=lambda piece: piece["file"])} != entry:
        inside = [{**piece, "elements": [0, np.diff(piece["elements"]).item()]} for piece in expected]
        numbers = " numbers elements within each file, not in the whole tensor: it" if found["pieces"] == inside else ""
        raise Wrong(f"index.json{numbers} says of w {json.dumps(found)}, expected {json.dumps(entry)}")
    if json.loads(raw["state.json"]) != {"step": 5, "loss": 1.5}:
        raise Wrong("state.json does not hold the step and the state")


def judge_loaded(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The right elements, each read once, a piece at most once; or a refusal before anything is read."""
    for rank, (given, result) in enumerate(zip(case.given, results, strict=True)):
        (start, stop), flaw = given["wanted"].tolist(), FLAWS[int(given["flaw"])]
        reads = [read for read in result["reads"].reshape(-1, 3).tolist() if read[1] < read[2]]
        if flaw and result["refused"] != 1:
            what = "a KeyError was raised" if result["refused"] else "load returned"
            raise Wrong(f"rank {rank} wants {start} to {stop} of w, {flaw}: {what}, expected a ValueError")
        if flaw and reads:
            raise Wrong(f"rank {rank}: {len(reads)} reads before the ValueError: look at all tensors before the first")
        if not flaw and result["refused"]:
            raise Wrong(f"rank {rank}: refused, though each element of a and w is there exactly once")
        if not flaw:
            expect_equal(rank, "element of a from 1 to 4: found", result["a"], np.arange(1.0, 4.0))
            for piece, first, last in (read for read in reads if read[0] >= 0):
                if last > (size := np.diff(given["parts"][piece, :2]).item()):
                    says = f"rank {rank} reads elements {first} to {last} of a piece which has {size}"
                    raise Wrong(f"{says}: they are numbered within the piece, not in the whole tensor")
            parts = [(a, b) for a, b, _ in given["parts"].tolist() if a < stop and b > start]
            mixed = np.concatenate([given["whole"][max(a, start) : min(b, stop)] for a, b in parts])
            moved = np.concatenate([given["whole"][a:b][max(a, start) : min(b, stop)] for a, b in sorted(parts)])
            instead = {"pieces are joined in the order of the index": mixed}
            instead["elements of a piece are numbered as in the whole tensor"] = moved
            expected = given["whole"][start:stop]
            expect_equal(rank, f"element of w from {start} to {stop}: found", result["w"], expected, instead=instead)
            if len(reads) != len({read[0] for read in reads}):
                raise Wrong(f"rank {rank} reads a piece more than once: (piece, first, last) are {reads}")
            if sum(b - a for _, a, b in reads) != stop - start + 3:
                sizes = {-1: 6} | {piece: int(b - a) for piece, (a, b, _) in enumerate(given["parts"])}
                whole = [read for read in reads if read[1:] == [0, sizes[read[0]]]]
                why = ": whole pieces are read, of which a part is wanted" if whole == reads else ""
                words = f"rank {rank} wants {stop - start + 3} elements and reads others"
                raise Wrong(f"{words}: (piece, first, last) {reads}{why}")


def judge_resumed(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The losses of the run that nothing disturbed: another process may round the last bit otherwise."""
    facts = case.given[0]["facts"].tolist()
    undisturbed = went_on(facts, 0, lambda saved, later, new: {})
    for number, (found, who) in enumerate(zip(results[0]["losses"], ("undisturbed", *RESUMED), strict=True)):
        instead = {clause: partial(went_on, facts, number, other) for clause, other in FORGOTTEN.items()}
        for names in (MOMENTS, ("order",), (*MOMENTS, "order"), ("weights",)):
            clause = f"{RESUMED[who]} {', '.join(names)}" if number else ""
            instead[clause] = partial(went_on, facts, number, partial(of_later, names))
        name = f"{who}: the loss of the next steps"
        expect_close(0, name, found, undisturbed, 1e-12, instead=instead if number else {})


MOMENTS = ("weights", "mean", "square")
RESUMED = {
    "resumed": "the run's own arrays are saved, which training goes on changing:",
    "resumed again": "the run is given the saved arrays themselves, and changes them:",
}


def of_later(names: Sequence[str], saved: Training, later: Training, new: Training) -> dict[str, object]:
    """Return what a run has if these arrays change with another, which went on."""
    return {name: getattr(later, name) for name in names}


FORGOTTEN: dict[str, Callable[[Training, Training, Training], dict[str, object]]] = {
    "the place in the epoch is forgotten, so it begins again": lambda saved, later, new: {"position": 0},
    "the order of the epoch is drawn anew": lambda saved, later, new: {"order": saved.generator.permutation(7)},
    "the order of the epoch is not restored": lambda saved, later, new: {"order": new.order},
    "the count of steps is not restored": lambda saved, later, new: {"step": new.step},
    "the generator is not restored": lambda saved, later, new: {"generator": new.generator},
    "Adam's moments are not restored": lambda saved, later, new: {"mean": new.mean, "square": new.square},
}


def went_on(
    facts: Sequence[int], number: int, other: Callable[[Training, Training, Training], dict[str, object]]
) -> Array:
    """Return the losses of a run that goes on from what was saved, but for what it has of another instead.

    `other` is given the saved run, the same after its next steps, and the new one, of this `number`, to be restored.
    """
    before, after, seed = facts
    run = Training(seed)
    for _ in range(before):
        run.take_step()
    saved, losses = copy.deepcopy(run), [run.take_step() for _ in range(after)]
    vars(saved).update(other(saved, run, Training(number)))
    return np.array([saved.take_step() for _ in losses])


def judge_answered(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Young's interval, and Daly's expectation."""
    times, ranks = case.given[0]["times"], case.given[0]["ranks"]
    young = np.sqrt(2 * times[:, 1] * times[:, 2])
    instead = {
        "the failures of one rank are counted, not of all": young * np.sqrt(ranks),
        "the time between failures is multiplied by the ranks: more of them fail more often": young * ranks,
        "the square root is not taken": young**2,
        "a 2 is left out": young / 2**0.5,
    }
    expect_close(0, "interval of question", results[0]["intervals"], young, instead=instead)
    for column, name in enumerate(("training", "writing", "lost")):
        wrongly = {clause: shares_by(times, whole)[:, column] for clause, whole in WHOLE.items()}
        expected, found = shares_by(times, exact)[:, column], results[0]["shares"][:, column]
        expect_close(0, f"{name} of question", found, expected, instead=wrongly)


def exact(compute: float, write: float, mtbf: float, restart: float) -> float:
    """Return how long an interval takes on average."""
    return mtbf * exp(restart / mtbf) * expm1((compute + write) / mtbf)


def rule_of_thumb(compute: float, write: float, mtbf: float, restart: float) -> float:
    """Return the same to first order."""
    return (compute + write) * (1 + ((compute + write) / 2 + restart) / mtbf)


Whole = Callable[[float, float, float, float], float]
WHOLE: dict[str, Whole] = {
    "the time to start again is left out": lambda compute, write, mtbf, restart: exact(compute, write, mtbf, 0),
    "each interval has one restart": lambda compute, write, mtbf, restart: exact(compute, write, mtbf, 0) + restart,
    "nothing fails while a checkpoint is written": lambda compute, write, mtbf, restart: exact(
        compute, 0, mtbf, restart
    ),
    "a failure costs half an interval and a restart, which is the rule of thumb": rule_of_thumb,
}


def shares_by(times: Array, whole: Whole) -> Array:
    """Return the three shares of each question [question, share] if an interval takes `whole` seconds."""
    parts = [(each[0] / whole(*each), each[1] / whole(*each)) for each in times.tolist()]
    return np.array([(training, writing, 1 - training - writing) for training, writing in parts])
