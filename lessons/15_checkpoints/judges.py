"""Lesson 15: the checks' programs and judges. What a crash would find is seen by looking after every call."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import exp, expm1, sqrt
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load as load_safetensors

from minidist import Communicator, Layout, Mesh
from minidist.course.grader.contract import Arrays, Case, Note, Wrong, expect_close, expect_equal

FOLDER, NEW, OLD = Path("checkpoints"), "step-00000005", "step-00000003"
LEFT = b"of an earlier run"
MISSING = 4
FLAWS = (
    "",
    "of which one element is missing",
    "of which one element is stored twice",
    "of which a piece lies one further, so one element is missing and one twice",
    "which is not stored",
)
PROGRESS = {"entered": 0, "ended": 0}  # of the rank that runs ahead: how many collective calls it has begun
Files = dict[str, list[Any]]  # of each file its number in the file system, and what it holds, in hexadecimal


def dealt(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1."""
    mesh = Mesh(comm, Layout(dp=int(given["sizes"][0]), tp=int(given["sizes"][1])))
    rows = given["tensors"].tolist()
    held = {
        f"{i}": SimpleNamespace(shape=(n, m), cut=bool(cut), sliced=bool(s)) for i, (n, m, cut, s) in enumerate(rows)
    }
    return {"found": [[int(name), *at] for name, at in exercise.pieces_to_write(held, mesh.dp, mesh.tp).items()]}


def look() -> Files:
    """Return what every file holds."""
    while True:
        with suppress(OSError):  # another rank renames or removes one just now
            return contents(FOLDER) if FOLDER.is_dir() else {}


def contents(folder: Path) -> Files:
    """Return what every file below `folder` holds.

    Not by `rglob`: now and then Python 3.11.2, which is Debian 12's, crashes after an error in such a generator.
    """
    found: Files = {}
    for path in [folder / name for name in os.listdir(folder)]:
        if path.is_file():
            found[str(path.relative_to(FOLDER))] = [path.stat().st_ino, path.read_bytes().hex()]
        elif path.is_dir() and not path.is_symlink():
            found |= contents(path)
    return found


def seen(flush: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return `os.fsync` or its like, in whose frame `watched` finds which file is flushed."""

    def flushing(descriptor: Any) -> None:
        flush(descriptor)

    return flushing


def watched(exercise: ModuleType, save: Callable[[], object]) -> list[dict[str, Any]]:
    """Look at the folder after each call of `save` into the interpreter's own functions; return changes and flushes."""
    space = exercise.save.__globals__
    for name in ("fsync", "fdatasync"):
        flush = getattr(os, name)
        setattr(os, name, seen(flush))  # of this process only, which ends with the case
        space |= {key: getattr(os, name) for key, value in space.items() if value is flush}
    outer, before, log = sys.getprofile(), look(), []

    def profile(frame: FrameType, event: str, what: Any) -> None:
        nonlocal before
        if outer is not None:
            outer(frame, event, what)
        done = event == "c_return" and (what.__module__ or type(what.__self__).__module__) != "builtins"
        flush, own = done and what.__name__ in ("fsync", "fdatasync"), frame.f_code.co_filename == __file__
        if flush or (done and not own and look() != before):
            before, line, number = look(), frame, 0
            while line.f_back is not None and line.f_code.co_filename != exercise.__file__:
                line = line.f_back
            if flush:
                file = frame.f_locals["descriptor"]
                number = os.fstat(file if isinstance(file, int) else file.fileno()).st_ino
            log.append({"time": time.monotonic_ns(), "line": line.f_lineno, "flush": number, "files": before})

    sys.setprofile(profile)
    try:
        save()
    finally:
        sys.setprofile(outer)
    return log


def let_ahead(comm: Communicator, ahead: int) -> None:
    """Have one rank run ahead of the others, to wherever it waits for them: what it does not wait for shows.

    Each of the others goes on after its nth `barrier` or `roll_call` only when that one has begun its next.
    """
    begun = 0

    def paced(call: Callable[..., Any]) -> Callable[..., Any]:
        def paced_call(*arguments: Any) -> Any:
            nonlocal begun
            begun += 1
            if comm.rank == ahead:
                PROGRESS["entered"] = begun
            answer = call(*arguments)
            until = time.monotonic() + 2  # it may wait for what it sees in the folder, and not by a call
            while comm.rank != ahead and PROGRESS["entered"] <= begun and time.monotonic() < until:
                if PROGRESS["ended"]:
                    break
                time.sleep(0.002)
            return answer

        return paced_call

    comm.barrier, comm.roll_call = paced(comm.barrier), paced(comm.roll_call)  # type: ignore[method-assign]


def saved(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 beside an earlier checkpoint; return what there was at every moment."""
    size, litter, again, ahead = given["facts"].tolist()
    names = [OLD, *[".unfinished-00000004", ".unfinished-00000005"] * litter, *[NEW] * again]
    for name in names * (comm.rank == 0):
        (FOLDER / name).mkdir(parents=True)
        (FOLDER / name / "rank-0009.safetensors").write_bytes(LEFT)
    if litter and comm.rank == 0:
        (FOLDER / ".unfinished-index.json").write_bytes(LEFT)
    comm.barrier()
    piece = SimpleNamespace(shape=(size,), start=int(given["start"]), values=torch.tensor(given["w"]))
    mine = {"w": piece} if len(given["w"]) else {}
    if comm.wire == "threads":
        let_ahead(comm, ahead)
    log, refused = [], ""
    try:
        log = watched(exercise, lambda: exercise.save(FOLDER, 5, mine, {"loss": 1.5}, comm))
    except Exception as error:
        refused = type(error).__name__
        if not again and (FOLDER / NEW).exists():
            words = f"{NEW} was renamed into place while rank {comm.rank} was still writing ({refused})"
            raise Wrong(f"{words}: whoever renames has to know that all have written") from error
        if not again or not isinstance(error, OSError):
            raise
    finally:
        if comm.rank == ahead:
            PROGRESS["ended"] = 1
    told = {"log": log, "end": look(), "refused": refused}
    return {"seen": np.frombuffer(json.dumps(told).encode(), np.uint8)}


def loaded(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3 for two tensors, `a` in one piece and `w`; note what is read."""
    parts, reads = {f"rank-{number:04d}": (a, b) for a, b, number in given["parts"].tolist()}, []
    whole = {"a": np.arange(6.0), "w": given["whole"]}
    stored = {"a": (6, [(0, 6, "rank-0000")])}
    if given["flaw"] != MISSING:
        stored["w"] = (len(given["whole"]), [(a, b, file) for file, (a, b) in parts.items()])

    def read(file: str, name: str, first: int, last: int) -> torch.Tensor:
        start, stop = parts[file] if name == "w" else (0, 6)
        reads.append([list(parts).index(file) if name == "w" else -1, first, last])
        return torch.tensor(whole[name][start:stop][first:last])

    try:
        found = exercise.load({"a": (1, 4), "w": tuple(given["wanted"].tolist())}, stored, read)
    except (ValueError, LookupError) as error:
        return {"reads": reads, "refused": 1 if isinstance(error, ValueError) else 2}
    return {"a": found["a"].numpy(), "w": found["w"].numpy(), "reads": reads, "refused": 0}


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


def resumed(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Save a run, let it go on, and go on from what was saved, twice."""
    before, after, seed = given["facts"].tolist()
    run = Training(seed)
    for _ in range(before):
        run.take_step()
    arrays, facts = exercise.state_of(run)
    text, losses = json.dumps(facts), [[run.take_step() for _ in range(after)]]
    for other in (1, 2):
        run = Training(other)
        exercise.restore(run, arrays, json.loads(text))
        losses.append([run.take_step() for _ in range(after)])
    return {"losses": losses}


def answered(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 5."""
    asked = list(zip(given["times"].tolist(), given["ranks"].tolist(), strict=True))
    intervals = [exercise.interval(write, mtbf * ranks, ranks) for (_, write, mtbf, _), ranks in asked]
    return {"intervals": intervals, "shares": [list(exercise.shares(*times)) for times, _ in asked]}


def judge_dealt(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Each element once, by a rank that holds it."""
    dp, tp = case.given[0]["sizes"].tolist()
    for number, (n, m, cut, sliced) in enumerate(case.given[0]["tensors"].tolist()):
        times, what = np.zeros(n * m, int), f"of a tensor ({n}, {m}), cut={bool(cut)}, sliced={bool(sliced)},"
        for rank, result in enumerate(results):
            block = np.split(np.arange(n * m), tp)[rank % tp] if cut else np.arange(n * m)
            mine = np.array_split(block, dp)[rank // tp] if sliced else block
            for _, start, stop in (row for row in result["found"].reshape(-1, 3).tolist() if row[0] == number):
                if start >= stop or not np.isin(np.arange(start, stop), mine).all():
                    raise Wrong(f"{what} rank {rank} writes {start} to {stop}, but holds {mine.tolist()}")
                times[start:stop] += 1
        for element in np.flatnonzero(times != 1):
            raise Wrong(f"{what} element {element} is written {times[element]} times, expected once")


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
                raise Wrong(f"rank {rank}: there was a checkpoint {NEW} already: {raised} raised, not FileExistsError")
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
        left = sorted({name.partition("/")[0] for name in one["end"]} - {OLD, NEW})
        if left:
            raise Wrong(f"when rank {rank} returns {', '.join(left)} is still there: of killed runs nothing is left")
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
        raise Wrong(f"index.json says of w {json.dumps(found)}, expected {json.dumps(entry)}")
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
            mixed = [given["whole"][a:b] for a, b, _ in given["parts"] if a < stop and b > start]
            instead = {"pieces are joined in the order of the index": lambda mixed=mixed: np.concatenate(mixed)}
            expected = given["whole"][start:stop]
            expect_equal(rank, f"element of w from {start} to {stop}: found", result["w"], expected, instead=instead)
            if len(reads) != len({read[0] for read in reads}):
                raise Wrong(f"rank {rank} reads a piece more than once: (piece, first, last) are {reads}")
            if sum(b - a for _, a, b in reads) != stop - start + 3:
                raise Wrong(
                    f"rank {rank} wants {stop - start + 3} elements and reads others: (piece, first, last) {reads}"
                )


def judge_resumed(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """The losses of the run that nothing disturbed: another process may round the last bit otherwise."""
    before, after, seed = case.given[0]["facts"].tolist()
    losses = [run.take_step() for run in [Training(seed)] * (before + after)][before:]
    for found, who in zip(results[0]["losses"], ("undisturbed", "resumed", "resumed again"), strict=True):
        expect_close(0, f"{who}: the loss of the next steps", found, np.array(losses), 1e-12)


def judge_answered(case: Case, results: Sequence[Arrays], notes: Sequence[Note]) -> None:
    """Young's interval, and Daly's expectation."""
    expected = []
    for compute, write, mtbf, restart in case.given[0]["times"].tolist():
        whole = mtbf * exp(restart / mtbf) * expm1((compute + write) / mtbf)
        expected.append([sqrt(2 * write * mtbf), compute / whole, write / whole, 1 - (compute + write) / whole])
    found = np.column_stack([results[0]["intervals"], results[0]["shares"]])
    for column, name in enumerate(("interval", "training", "writing", "lost")):
        expect_close(0, f"{name} of question", found[:, column], np.array(expected)[:, column])
