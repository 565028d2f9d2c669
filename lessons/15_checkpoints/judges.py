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
from minidist.grade.contract import Arrays, Case, Note, Wrong, expect_close, expect_equal

FOLDER, NEW, OLD = Path("checkpoints"), "step-00000005", "step-00000003"


def dealt(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1."""
    mesh = Mesh(comm, Layout(dp=int(given["sizes"][0]), tp=int(given["sizes"][1])))
    rows = given["tensors"].tolist()
    held = {
        f"{i}": SimpleNamespace(shape=(n, m), cut=bool(cut), sliced=bool(s)) for i, (n, m, cut, s) in enumerate(rows)
    }
    return {"found": [[int(name), *at] for name, at in exercise.pieces_to_write(held, mesh.dp, mesh.tp).items()]}


def look() -> dict[str, str]:
    """Return what every file holds, in hexadecimal."""
    while True:
        with suppress(OSError):  # another rank renames or removes one just now
            return contents(FOLDER) if FOLDER.is_dir() else {}


def contents(folder: Path) -> dict[str, str]:
    """Return what every file below `folder` holds.

    Not by `rglob`: now and then Python 3.11.2, which is Debian 12's, crashes after an error in such a generator.
    """
    found: dict[str, str] = {}
    for path in [folder / name for name in os.listdir(folder)]:
        if path.is_file():
            found[str(path.relative_to(FOLDER))] = path.read_bytes().hex()
        elif path.is_dir() and not path.is_symlink():
            found |= contents(path)
    return found


def watched(exercise: ModuleType, save: Callable[[], object]) -> list[dict[str, Any]]:
    """Look at the folder after each call of `save` into the interpreter's own functions; return changes and flushes."""
    outer, before, log = sys.getprofile(), look(), []

    def profile(frame: FrameType, event: str, what: Any) -> None:
        nonlocal before
        if outer is not None:
            outer(frame, event, what)
        done = event == "c_return" and (what.__module__ or type(what.__self__).__module__) != "builtins"
        flush = done and what.__name__ in ("fsync", "fdatasync")
        if flush or (done and look() != before):
            before, line = look(), frame
            while line.f_back is not None and line.f_code.co_filename != exercise.__file__:
                line = line.f_back
            log.append({"time": time.monotonic_ns(), "line": line.f_lineno, "flush": flush, "files": before})

    sys.setprofile(profile)
    try:
        save()
    finally:
        sys.setprofile(outer)
    return log


def saved(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 2 beside an earlier checkpoint; return what there was at every moment."""
    size, litter = given["facts"].tolist()
    for name in [OLD, *[".unfinished-00000004", ".unfinished-00000005"] * litter] * (comm.rank == 0):
        (FOLDER / name).mkdir(parents=True)
        (FOLDER / name / "rank-0009.safetensors").write_bytes(b"of an earlier run")
    comm.barrier()
    piece = SimpleNamespace(shape=(size,), start=int(given["start"]), values=torch.tensor(given["w"]))
    mine = {"w": piece} if len(given["w"]) else {}
    log = watched(exercise, lambda: exercise.save(FOLDER, 5, mine, {"loss": 1.5}, comm))
    return {"seen": np.frombuffer(json.dumps({"log": log, "end": look()}).encode(), np.uint8)}


def loaded(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 3; note what is read."""
    parts, reads = {f"rank-{number:04d}": (a, b) for a, b, number in given["parts"].tolist()}, []

    def read(file: str, name: str, first: int, last: int) -> torch.Tensor:
        start, stop = parts[file]
        reads.append([list(parts).index(file), first, last])
        return torch.tensor(given["whole"][start:stop][first:last])

    stored = {"w": (len(given["whole"]), [(a, b, file) for file, (a, b) in parts.items()])}
    try:
        found = exercise.load({"w": tuple(given["wanted"].tolist())}, stored, read)["w"].numpy()
    except ValueError:
        return {"reads": reads}
    return {"found": found, "reads": reads}


class Training:
    """Task 4's run: a regression with dropout on 7 rows, two a step."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.weights, self.mean, self.square = ({"w": self.generator.random(3)} for _ in range(3))
        self.step, self.position, self.order = 0, 7, np.arange(7)

    def take_step(self) -> float:
        """Return the loss before it."""
        if self.position + 2 > 7:
            self.order, self.position = self.generator.permutation(7), 0
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
    end, flushed, flushes = told[0]["end"], set(), 0
    new = {name: text for name, text in end.items() if name.startswith(NEW)}
    for moment in sorted((moment for one in told for moment in one["log"]), key=lambda moment: moment["time"]):
        files, where = moment["files"], f"at line {moment['line']}"
        there = {name: text for name, text in files.items() if name.startswith(NEW)}
        if not any(name.startswith(OLD) for name in files):
            raise Wrong(f"{where} the earlier checkpoint {OLD} is gone: a crash there loses both")
        if there and there != new:
            lacks = sorted(name for name in {*new, *there} if there.get(name) != new.get(name))
            raise Wrong(f"{where} there is a folder {NEW} which is not complete: see {', '.join(lacks)}")
        if there and (flushes < len(new) or not flushed.issuperset(new.values())):
            raise Wrong(f"{where} {len(new)} files were renamed after {flushes} were flushed: some may turn out empty")
        flushed, flushes = flushed | set(files.values()) if moment["flush"] else flushed, flushes + moment["flush"]
    for rank, one in enumerate(told):
        if one["end"] != end or {name.partition("/")[0] for name in end} != {OLD, NEW}:
            raise Wrong(f"when rank {rank} returns there is {', '.join(one['end'])}, expected {OLD} and {NEW} complete")
    judge_files(case, {name.removeprefix(NEW + "/"): bytes.fromhex(text) for name, text in new.items()})


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
        (start, stop), flawed, refused = given["wanted"], bool(given["flawed"]), "found" not in result
        reads = [read for read in result["reads"].reshape(-1, 3).tolist() if read[1] < read[2]]
        if flawed != refused or (flawed and reads):
            raise Wrong(f"rank {rank}: pieces flawed: {flawed}, ValueError raised: {refused}, after {len(reads)} reads")
        if not flawed:
            expect_equal(rank, f"elements {start} to {stop}", result["found"], given["whole"][start:stop])
            if len(reads) != len({read[0] for read in reads}) or sum(b - a for _, a, b in reads) != stop - start:
                raise Wrong(f"rank {rank} wants {stop - start} elements, but its reads (file, first, last) are {reads}")


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
