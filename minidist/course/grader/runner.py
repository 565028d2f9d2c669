"""Run one case in a process of its own, and collect what its ranks recorded.

    folder/ job.json exercise.py (the student's, and nothing else of theirs) given-0 given-1 ...
             ──▶ child.main(folder) ──▶   record-0  record-1 ...   hang-0.txt

The process gets an environment with nothing of the student's in it, an empty working folder, which
is also where it makes temporary files, a session of its own and a time limit. Neither what it
prints nor its exit status is a grade: only records that are signed with the nonces count.
"""

import functools
import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from minidist.course.grader import record
from minidist.course.grader.contract import Arrays, Case, Note
from minidist.course.grader.hang import hang_report
from minidist.course.grader.warm import SUPPORTED, Warm, isolated
from minidist.course.lesson import Answer, Lesson
from minidist.full.launch.jobs import run_job
from minidist.full.launch.mpirun import Mpirun, environment, find_mpirun

KEPT = {
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "SYSTEMROOT",
    "OMP_NUM_THREADS",
}
KEPT_OF_MPI = ("MPICH_", "OMPI_", "PRTE_", "FI_")
UNREADABLE = (
    "the check fails at {} ({}: {}): its own fault, unless the answer returns other than its "
    "docstring says"
)
found_mpirun = functools.cache(find_mpirun)
SECONDARY = ("RankFailed", "CommunicationError")  # raised because another rank failed


class Ran(NamedTuple):
    """The outcome of a case: all ranks' results, or why there are none."""

    results: Sequence[Arrays] = ()
    notes: Sequence[Note] = ()
    failure: str = ""
    not_started: str = ""
    hung: bool = False


class Told(NamedTuple):
    """What one rank recorded: nothing, if no record is signed with its nonce."""

    done: bool
    error: Mapping[str, str]
    notes: Sequence[Note]
    results: Arrays


def run_case(
    lesson: Lesson, index: int, case: Case, answer: Answer, limit: float, warm: Warm
) -> Ran:
    """Run check number `index` of the lesson on one case, for at most `limit` seconds. It leaves no
    process behind.
    """
    check, checks = lesson.checks[index], str(warm.copy_of(lesson.folder.resolve()))
    with tempfile.TemporaryDirectory(prefix="minidist-grade-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        exercise, stand = folder / "exercise.py", folder / "here"
        stand.mkdir()
        shutil.copyfile(answer.path, exercise)
        nonces = [secrets.token_hex(16) for _ in case.given]
        for rank, (nonce, given) in enumerate(zip(nonces, case.given, strict=True)):
            record.write(folder / f"given-{rank}", {"nonce": nonce}, given)
        job = {
            "lesson": checks,
            "index": index,
            "wire": check.wire,
            "ranks": case.ranks,
            "limit": limit,
            "exercise": str(exercise),
            "beside": [checks] if answer.may_lean else [],
        }
        (folder / "job.json").write_text(json.dumps(job))
        if warm.user is not None:
            for path in (folder, *folder.iterdir()):
                shutil.chown(path, warm.user)
        if check.wire == "threads" and SUPPORTED:
            warm.run(folder, stand, limit)
        else:
            mpirun = found_mpirun() if check.wire == "mpi" else None
            forked = SUPPORTED and mpirun is not None and mpirun.vendor == "MPICH"
            start = [mpirun.path, "-n", str(case.ranks)] if mpirun is not None else []
            start += warm.rank(folder) if forked else isolated("child", folder)
            env = {**clean_environment(mpirun), "TMPDIR": str(stand)}
            run_job(
                start,
                env=env,
                cwd=stand,
                timeout=limit + 3,
                capture=True,
                grace=0.5,
                user=warm.user,
            )
        return collect(folder, nonces, limit)


def warm_processes(
    lessons: Sequence[Lesson],
    processes: int,
    user: str | None = None,
    answers: Sequence[Answer] = (),
) -> Warm:
    """Return what runs the cases of some lessons, up to `processes` at a time. Where one of the
    answers imports torch, it is imported once for all of their cases.
    """
    checks = [(lesson.folder / "checks.py").resolve() for lesson in lessons]
    torch = ["torch"] if any(map(imports_torch, answers)) else []
    return Warm(checks, clean_environment(None), processes, user, torch)


def imports_torch(answer: Answer) -> bool:
    """Tell whether a file has a line that imports torch. (A lesson of numpy alone does not.)"""
    text = answer.path.read_text(encoding="utf-8", errors="replace")
    return re.search(r"^[ \t]*(import|from) torch\b", text, re.MULTILINE) is not None


def collect(folder: Path, nonces: Sequence[str], limit: float) -> Ran:
    """Return what the ranks recorded, or the reason why one did not."""
    told = [told_by(folder / f"record-{rank}", nonce) for rank, nonce in enumerate(nonces)]
    report = hang_report(folder, len(nonces), limit)
    return outcome(told) or Ran(
        notes=[note for one in told for note in one.notes],
        failure=report or missing(told),
        hung=bool(report),
    )


def outcome(told: Sequence[Told]) -> Ran | None:
    """Return what comes of what the ranks recorded; nothing if one recorded neither results nor an
    error.
    """
    notes = [note for one in told for note in one.notes]
    if errors := [(rank, one.error) for rank, one in enumerate(told) if one.error]:
        rank, error = min(errors, key=lambda pair: pair[1]["type"] in SECONDARY)
        if error["type"] == "NotImplementedError":
            return Ran(notes=notes, not_started=error["text"] or "not started")
        return Ran(notes=notes, failure=sentence(rank, **error))
    return Ran([one.results for one in told], notes) if all(one.done for one in told) else None


def missing(told: Sequence[Told]) -> str:
    """Say which ranks left no record."""
    ranks = ", ".join(str(rank) for rank, one in enumerate(told) if not one.done)
    return f"rank {ranks} left no record of this run: a process ended before the check did"


def sentence(rank: int, type: str, text: str, line: str) -> str:
    """Return what a student is told about the error that ended a rank."""
    if type == "DeadlockError":
        return text
    if type == "Wrong":
        return f"rank {rank}: {text}"
    if line and not line.startswith("exercise.py"):
        return UNREADABLE.format(line, type, text)
    return f"rank {rank} raised {type}{f' at {line}' if line else ''}: {text}"


def told_by(path: Path, nonce: str) -> Told:
    """Return what a rank recorded, if it is a record signed with the nonce of this run."""
    try:
        facts, results = record.read(path, nonce)
        notes = [Note(**{**note, "through": tuple(note["through"])}) for note in facts["notes"]]
        error = (
            {name: str(facts["error"][name]) for name in ("type", "text", "line")}
            if facts["error"]
            else {}
        )
        return Told(bool(facts["done"]), error, notes, results)
    except (record.BadRecord, KeyError, TypeError):
        return Told(False, {}, (), {})


def clean_environment(mpirun: Mpirun | None) -> dict[str, str]:
    """Return what a child may know of this process's environment."""
    prefixes = () if mpirun is None else KEPT_OF_MPI
    return {
        name: value
        for name, value in environment(mpirun).items()
        if name in KEPT or name.startswith(prefixes)
    }
