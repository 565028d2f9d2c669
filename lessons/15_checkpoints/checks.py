"""Lesson 15: what is checked, and for how many points."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from judges import LEFT, NEW, OLD, judge_loaded, judge_saved
from judges_pieces import judge_dealt
from judges_run import Training, judge_answered, judge_resumed

from minidist import Communicator, Layout, Mesh
from minidist.course.grader.contract import (
    STRATEGIES,
    TRAINER,
    Array,
    Arrays,
    Case,
    Check,
    Draw,
    Task,
    Wrong,
)

BY_HAND = (*TRAINER, *STRATEGIES)
PIECES = Task(1, "who writes what", BY_HAND)
SAVE = Task(2, "all of it or nothing", BY_HAND, may_use=("comm.all_gather_object",))
LOAD = Task(3, "into another layout", BY_HAND)
RESUME = Task(4, "all that a run is", BY_HAND)
CADENCE = Task(5, "how often", BY_HAND)
FOLDER = Path("checkpoints")
MISSING = 4
# of the rank that runs ahead: how many collective calls it has begun
PROGRESS = {"entered": 0, "ended": 0}
# of each file its number in the file system, and what it holds, in hexadecimal
Files = dict[str, list[Any]]

# ---------------------------------------------------------------- cases


def each(make: Callable[..., Case], *shapes: tuple[Any, ...]) -> Draw:
    """Make a case of each shape."""
    return lambda rng: [make(rng, *shape) for shape in shapes]


def spread(rng: np.random.Generator, dp: int, tp: int) -> Case:
    """Draw a tensor of each kind, and two that dp does not divide: (rows, columns, cut, sliced)."""
    rows, columns = tp * rng.integers(1, 4, 4), rng.integers(1, 6, 4)
    table = np.c_[[*rows, 1, 1], [*columns, 1, dp + 1], [0, 0, 1, 1, 0, 0], [0, 1, 0, 1, 1, 1]]
    return Case(({"sizes": np.array([dp, tp]), "tensors": table},) * (dp * tp), f"dp={dp} tp={tp}")


def pieces(
    rng: np.random.Generator,
    writers: int,
    litter: int = 0,
    idle: int = 0,
    ahead: int = 0,
    again: int = 0,
) -> Case:
    """Deal a tensor out to `writers`; `idle` ranks have nothing. `litter`: what a killed run has
    left.

    Rank `ahead` runs ahead of the others; `again`: there is a checkpoint of this step already.
    """
    whole, ranks = rng.normal(size=(rng.integers(writers, 9),)), writers + idle
    cuts = [len(whole) * min(rank, writers) // writers for rank in range(ranks + 1)]
    shared = {"facts": np.array([len(whole), litter, again, ahead])}
    given = tuple({**shared, "start": np.array(a), "w": whole[a:b]} for a, b in pairwise(cuts))
    label = (
        f"{ranks} "
        f"ranks{', after a crash' * litter}{', one with nothing' * idle}{', the step is there' * again}"
    )
    return Case(given, label + f", rank {ahead} ahead" * (ranks > 1))


def layouts(rng: np.random.Generator, stored: int, wanted: int, flaw: int = 0) -> Case:
    """Cut a tensor for `stored` ranks, shuffled, and ask for it on `wanted` ranks; `flaw` spoils
    the index.
    """
    size = int(rng.integers(20, 40))
    cuts = np.sort(np.r_[0, rng.choice(np.arange(1, size), stored - 1, replace=False), size])
    parts = np.c_[cuts[:-1], cuts[1:], np.arange(stored)]
    if flaw in (1, 2):
        parts[-1, 0] += 3 - 2 * flaw
    elif flaw == 3:
        parts[-2, :2] += 1
    elif flaw in (5, 6):
        parts[-1, 1] += 2 * flaw - 11
    elif flaw == 7:
        parts[0, 0] += 1
    shared = {
        "parts": rng.permutation(parts),
        "whole": rng.normal(size=size),
        "flaw": np.array(flaw),
    }
    given = tuple(
        {**shared, "wanted": np.array([size * r, size * (r + 1)]) // wanted} for r in range(wanted)
    )
    words = (
        "",
        ", one element missing",
        ", one element twice",
        ", a piece shifted",
        ", nothing stored",
    )
    words += (", the last element missing", ", one element too many", ", the first element missing")
    return Case(given, f"{stored} files for {wanted}{words[flaw]}")


def resumption(rng: np.random.Generator, before: int, after: int) -> Case:
    """Draw a seed."""
    return Case(
        ({"facts": np.array([before, after, rng.integers(1 << 30)])},),
        f"{before} steps, then {after}",
    )


def failures(rng: np.random.Generator, cases: int) -> Case:
    """Ask for (compute, write, mtbf, restart), and ranks."""
    times = rng.uniform((100, 5, 1e3, 0), (900, 90, 1e4, 500), (cases, 4))
    return Case(({"times": times, "ranks": rng.integers(1, 2000, cases)},), f"{cases} questions")


# ---------------------------------------------------------------- programs: on every rank, with the student's module


def dealt(exercise: ModuleType, comm: Communicator, given: Arrays) -> dict[str, Any]:
    """Run task 1."""
    mesh = Mesh(comm, Layout(dp=int(given["sizes"][0]), tp=int(given["sizes"][1])))
    rows = given["tensors"].tolist()
    held = {
        f"{i}": SimpleNamespace(shape=(n, m), cut=bool(cut), sliced=bool(s))
        for i, (n, m, cut, s) in enumerate(rows)
    }
    return {
        "found": [
            [int(name), *at]
            for name, at in exercise.pieces_to_write(held, mesh.dp, mesh.tp).items()
        ]
    }


def look() -> Files:
    """Return what every file holds."""
    while True:
        with suppress(OSError):  # another rank renames or removes one just now
            return contents(FOLDER) if FOLDER.is_dir() else {}


def contents(folder: Path) -> Files:
    """Return what every file below `folder` holds.

    Not by `rglob`: now and then Python 3.11.2, which is Debian 12's, crashes after an error in such
    a generator.
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
    """Look at the folder after each call of `save` into the interpreter's own functions; return
    changes and flushes.
    """
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
        done = (
            event == "c_return"
            and (what.__module__ or type(what.__self__).__module__) != "builtins"
        )
        flush, own = (
            done and what.__name__ in ("fsync", "fdatasync"),
            frame.f_code.co_filename == __file__,
        )
        if flush or (done and not own and look() != before):
            before, line, number = look(), frame, 0
            while line.f_back is not None and line.f_code.co_filename != exercise.__file__:
                line = line.f_back
            if flush:
                file = frame.f_locals["descriptor"]
                number = os.fstat(file if isinstance(file, int) else file.fileno()).st_ino
            log.append(
                {
                    "time": time.monotonic_ns(),
                    "line": line.f_lineno,
                    "flush": number,
                    "files": before,
                }
            )

    sys.setprofile(profile)
    try:
        save()
    finally:
        sys.setprofile(outer)
    return log


def let_ahead(comm: Communicator, ahead: int) -> None:
    """Have one rank run ahead of the others, to wherever it waits for them: what it does not wait
    for shows.

    Each of the others goes on after its nth `barrier` or `all_gather_object` only when that one has begun
    its next.
    """
    begun = 0

    def paced(call: Callable[..., Any]) -> Callable[..., Any]:
        def paced_call(*arguments: Any) -> Any:
            nonlocal begun
            begun += 1
            if comm.rank == ahead:
                PROGRESS["entered"] = begun
            answer = call(*arguments)
            # it may wait for what it sees in the folder, and not by a call
            until = time.monotonic() + 2
            while comm.rank != ahead and PROGRESS["entered"] <= begun and time.monotonic() < until:
                if PROGRESS["ended"]:
                    break
                time.sleep(0.002)
            return answer

        return paced_call

    comm.barrier, comm.all_gather_object = paced(comm.barrier), paced(comm.all_gather_object)  # type: ignore[method-assign]


def small_talk(comm: Communicator, values: Array) -> None:
    """Have `comm.all_gather_object` refuse what has the values of this rank's piece in it."""
    call = comm.all_gather_object

    def looked_at(answer: Any) -> list[Any]:
        said = repr(answer)
        if any(each in said for each in ("tensor(", "array(", *map(repr, values.tolist()))):
            raise Wrong(
                "comm.all_gather_object is given the values of this rank's piece: each rank writes its own "
                "into its own file, and all_gather_object is for names, shapes and numbers of them"
            )
        return call(answer)

    comm.all_gather_object = looked_at  # type: ignore[method-assign]


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
    piece = SimpleNamespace(
        shape=(size,), start=int(given["start"]), values=torch.tensor(given["w"])
    )
    mine = {"w": piece} if len(given["w"]) else {}
    if comm.wire.kind == "threads":
        let_ahead(comm, ahead)
    small_talk(comm, given["w"])
    log, refused = [], ""
    try:
        log = watched(exercise, lambda: exercise.save(FOLDER, 5, mine, {"loss": 1.5}, comm))
    except Exception as error:
        refused = type(error).__name__
        if not again and (FOLDER / NEW).exists():
            words = (
                f"{NEW} was renamed into place while rank {comm.rank} was still writing ({refused})"
            )
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
    intervals = [
        exercise.interval(write, mtbf * ranks, ranks) for (_, write, mtbf, _), ranks in asked
    ]
    return {"intervals": intervals, "shares": [list(exercise.shares(*times)) for times, _ in asked]}


FLAWED = ((3, 1, 1), (3, 3, 2), (3, 2, 3), (2, 1, 4), (3, 2, 5), (2, 2, 6), (2, 2, 7))
CHECKS = [
    Check(
        PIECES,
        "replicas, blocks, slices",
        9,
        each(spread, (3, 1), (1, 2), (2, 2)),
        dealt,
        judge_dealt,
    ),
    Check(PIECES, "the same under mpirun", 3, each(spread, (2, 1)), dealt, judge_dealt, wire="mpi"),
    Check(SAVE, "one rank", 6, each(pieces, (1,)), saved, judge_saved),
    Check(SAVE, "several ranks", 8, each(pieces, (2,), (3, 0, 0, 2)), saved, judge_saved),
    Check(SAVE, "after a killed run", 5, each(pieces, (2, 1)), saved, judge_saved),
    Check(SAVE, "the step is there already", 2, each(pieces, (2, 0, 0, 0, 1)), saved, judge_saved),
    Check(SAVE, "the same under mpirun", 4, each(pieces, (2, 1)), saved, judge_saved, wire="mpi"),
    Check(
        LOAD,
        "other numbers of ranks",
        11,
        each(layouts, (2, 3), (3, 2), (4, 1)),
        loaded,
        judge_loaded,
    ),
    Check(LOAD, "an index that is wrong", 4, each(layouts, *FLAWED), loaded, judge_loaded),
    Check(
        RESUME,
        "as if nothing had happened",
        12,
        each(resumption, (4, 6), (1, 3)),
        resumed,
        judge_resumed,
    ),
    Check(CADENCE, "interval and shares", 8, each(failures, (3,)), answered, judge_answered),
]

# ---- hidden: other cases of the checks above ----

CHECKS += [
    Check(PIECES, "other meshes", 6, each(spread, (3, 2), (2, 3)), dealt, judge_dealt, hidden=True),
    Check(
        SAVE,
        "other ranks",
        7,
        each(pieces, (4, 0, 0, 1), (2, 1, 1)),
        saved,
        judge_saved,
        hidden=True,
    ),
    Check(
        LOAD, "other layouts", 5, each(layouts, (5, 4), (2, 6)), loaded, judge_loaded, hidden=True
    ),
    Check(RESUME, "other seeds", 6, each(resumption, (7, 9)), resumed, judge_resumed, hidden=True),
    Check(
        CADENCE, "other questions", 4, each(failures, (5,)), answered, judge_answered, hidden=True
    ),
]
