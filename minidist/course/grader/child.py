"""The process that runs a student's code: all simulated ranks of one case, or one rank of an
`mpirun`.

    1  be silent; join the other ranks; read what each rank here is given, and its nonce; delete the
       files with them
    2  load the lesson's checks, then the student's file
    3  run the check's program through a witness; see that nothing of the package was replaced;
       write one record per rank

The order is the point: student code that is loaded before step 1 has ended could read the nonces.
"""

import faulthandler
import importlib
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TextIO, TypeAlias

import minidist
from minidist.course.grader import record
from minidist.course.grader.contract import UNUSABLE, Array, Check, Note, Program, Wrong
from minidist.course.grader.watch import Handed, Returned, Watch
from minidist.course.grader.witness import Witness
from minidist.course.lesson import load_checks, load_module, place_of
from minidist.full.comm.communicator import Communicator
from minidist.full.comm.errors import CommunicationError
from minidist.full.launch.imports import quick_imports

# A part of the package: its full name, the namespace where it lies, its name there, itself, and its
# code.
Part: TypeAlias = tuple[str, Mapping[str, object], str, object, object]
FOR_EVER = 1e6  # seconds: the job's own limit comes first
MEMORY = 4 << 30  # bytes that one process may hold
NOTHING_YET = Returned("", False)
# what has words of its own, or tells of another rank's error
TOLD_ELSEWHERE = (Wrong, CommunicationError, NotImplementedError)


class Prepared(NamedTuple):
    """What is done once for many cases, in the process that forks theirs.

    Checks are loaded, by path, and the package, as imported by then, is sealed; `modules` there are
    in all, and `before` are the ids of their globals, which a forked process shares.
    """

    checks: Mapping[str, Sequence[Check]] = {}
    sealed: Sequence[Part] = ()
    modules: int = 0
    before: Set[int] = frozenset()


@dataclass
class Share:
    """What one rank is given, and what it hands back."""

    rank: int
    nonce: str
    given: dict[str, Array]
    notes: list[Note] = field(default_factory=list)
    results: dict[str, Array] | None = None
    error: dict[str, str] | None = None


def main(name: str, prepared: Prepared | None = None) -> None:
    """Run the case that the grader has put into the folder `name`."""
    silence()
    folder, write = Path(name), record.write
    job: dict[str, Any] = json.loads((folder / "job.json").read_text())
    world = minidist.init(limit=FOR_EVER) if job["wire"] == "mpi" else None
    ranks = range(job["ranks"]) if world is None else [world.rank]
    shares = {rank: take_share(folder, rank) for rank in ranks}
    if world is not None:
        world.barrier()  # until here every rank has taken its nonce away
    hang = open(folder / f"hang-{ranks[0]}.txt", "w", buffering=1)  # noqa: SIM115  # faulthandler keeps it
    faulthandler.dump_traceback_later(job["limit"], exit=world is None, file=hang)
    try:
        run_shares(job, prepared or Prepared(), shares, world, hang)
    except BaseException as error:
        if not any(share.error for share in shares.values()):  # it came before any rank had started
            for share in shares.values():
                share.error = describe(error, job["exercise"], job["lesson"])
    finally:  # with functions of before the student's code came, which may have replaced them
        for share in shares.values():
            notes = [note._asdict() for note in list(share.notes)]
            facts = {"error": share.error, "done": share.results is not None, "notes": notes}
            write(folder / f"record-{share.rank}", facts, share.results or {}, share.nonce)
    if world is None:
        os._exit(0)  # no thread and no exit handler of the student's is waited for
    elif shares[world.rank].error is not None:
        world.fail(RuntimeError(f"rank {world.rank} failed"))


def run_shares(
    job: dict[str, Any],
    prepared: Prepared,
    shares: dict[int, Share],
    world: Communicator | None,
    hang: TextIO,
) -> None:
    """Load the student's code and run the check's program on the ranks of this process."""
    limit_resources()
    with quick_imports():
        path = Path(job["lesson"], "checks.py")
        check = (prepared.checks.get(str(path)) or load_checks(path))[job["index"]]
        for name in check.task.imports:
            importlib.import_module(name)
    sys.path[:0] = job["beside"]
    # to look at each would be to copy it from that process
    as_prepared = len(sys.modules) == prepared.modules
    sealed = prepared.sealed if as_prepared else seal()
    hang.write(f"{threading.get_ident():#018x} = rank {min(shares)}\n")
    watch = Watch(check.task, job["exercise"], job["lesson"], shares[min(shares)].notes.append)
    watch.begin(prepared.before if as_prepared else frozenset())
    with quick_imports():
        exercises = exercises_of(shares, watch)
    run_program(check.program, exercises, watch, shares, world, hang, bool(job["beside"]))
    check_untouched(sealed)


def exercises_of(shares: Mapping[int, Share], watch: Watch) -> dict[int, ModuleType]:
    """Load the student's file once for each rank, so that simulated ranks share no variable."""
    return {rank: load_module("exercise", Path(watch.exercise)) for rank in shares}


def run_program(
    program: Program,
    exercises: Mapping[int, ModuleType],
    watch: Watch,
    shares: Mapping[int, Share],
    world: Communicator | None,
    hang: TextIO,
    may_lean: bool = False,
) -> None:
    """Run a check's program on the ranks of this process; `hang` is told which thread is whose."""

    def one_rank(comm: Communicator) -> None:
        share = shares[comm.rank]
        hang.write(f"{threading.get_ident():#018x} = rank {comm.rank}\n")
        watch.switch(watch.calls)
        try:
            sent = comm.traffic.messages  # a barrier, so far
            witness = Communicator(
                Witness(comm.wire, share.notes.append, watch), comm.ledger.of_group()
            )
            share.results = record.plain(
                program(Handed(exercises[comm.rank], watch), witness, share.given)
            )
            if sys.getprofile() is not watch.calls:
                raise Wrong(
                    "the answer replaces sys.setprofile's function, by which calls are watched"
                )
            watch.switch(None)
            check_seen(share, comm.traffic.messages - sent)
        except BaseException as error:
            last = watch.returned.get(threading.get_ident(), NOTHING_YET)
            # where a check fails is of use to who writes it, and tries solutions and mistakes
            last = NOTHING_YET if may_lean and not last.nothing else last
            share.results, share.error = None, describe(error, watch.exercise, watch.lesson, last)
            raise

    if world is None:
        minidist.run(one_rank, len(shares))
    else:
        one_rank(world)
    watch.switch(None)


def take_share(folder: Path, rank: int) -> Share:
    """Read what a rank is given, and leave no trace of it."""
    path = folder / f"given-{rank}"
    facts, arrays = record.read(path)
    path.unlink()
    return Share(rank, facts["nonce"], {name: array.copy() for name, array in arrays.items()})


def describe(
    error: BaseException, exercise: str, lesson: str, last: Returned = NOTHING_YET
) -> dict[str, str]:
    """Return an error as plain text: its type, what it says, and where it came from.

    `line` is the innermost line of the student's file that led to the error, or if none did, that
    of the checks. A `NotImplementedError` raised by the student's own file says that the task is
    not started; any other does not. `last` is the student's function that came back to the checks
    last: an error of the checks after that is caused by what it returned or left.
    """
    frames = traceback.extract_tb(error.__traceback__)
    places = [
        place_of(frame)
        for file in (lesson, exercise)
        for frame in frames
        if frame.filename.startswith(file)
    ]
    if isinstance(error, SyntaxError) and error.filename == exercise:
        places.append(f"{Path(exercise).name}:{error.lineno}")
    in_checks = bool(places) and not any(frame.filename == exercise for frame in frames)
    if in_checks and (said := answers_doing(error, last)):
        return {"type": "Wrong", "text": said, "line": places[-1]}
    foreign = isinstance(error, NotImplementedError) and frames[-1].filename != exercise
    kind = type(error).__name__ + " of a library" * foreign
    return {"type": kind, "text": str(error)[:2000], "line": places[-1] if places else ""}


def answers_doing(error: BaseException, last: Returned) -> str:
    """Return what to say of an error in a line of the checks that the answer has caused; nothing if
    it did not.

    It takes other arguments than the checks give, or what it returned, or left, is not what was
    expected.
    """
    text = str(error)[:2000]
    call = re.match(r"(\w+)[\w.]*\(\) (takes|missing|got)", text)
    if isinstance(error, TypeError) and call and hasattr(sys.modules.get("exercise"), call[1]):
        return f"{text}: keep the arguments as they are in the handout, the checks call it so"
    if not last.name or not isinstance(error, Exception) or isinstance(error, TOLD_ELSEWHERE):
        return ""
    if isinstance(error, TypeError | AttributeError) and last.nothing and "NoneType" in text:
        return (
            f"the check meets None where a value is expected ({text}), and {last.name} returned "
            "None: does it return, or leave, what its docstring says?"
        )
    return UNUSABLE.format(f"{last.name} returned or left", type(error).__name__, text)


def seal() -> list[Part]:
    """Return the package's modules by now, and what these and the classes in them consist of:
    functions, with code; and None for what a class inherits from another of the package.
    """
    modules = {
        name: one for name, one in list(sys.modules.items()) if name.partition(".")[0] == "minidist"
    }
    named = (value for module in modules.values() for value in vars(module).values())
    classes = {
        f"{one.__module__}.{one.__qualname__}": one for one in named if isinstance(one, type)
    }
    parts: list[Part] = [
        (name, sys.modules, name, module, None) for name, module in modules.items()
    ]
    for space, one in classes.items():
        for base in one.__mro__[1:]:
            inherited = vars(base).keys() - vars(one).keys() if base in classes.values() else ()
            parts += [(f"{space}.{name}", vars(one), name, None, None) for name in inherited]
    return parts + [
        (f"{space}.{name}", vars(one), name, value, getattr(value, "__code__", None))
        for space, one in [*modules.items(), *classes.items()]
        for name, value in vars(one).items()
        if callable(value) or isinstance(value, (property, staticmethod, classmethod))
    ]


def check_untouched(sealed: Sequence[Part]) -> None:
    """Raise if the student's code replaced a part of the package."""
    for full_name, space, name, value, code in sealed:
        found = space.get(name)
        # what has no code is not asked for it: a package may import all that it exports to find out
        touched = found is not value or (
            code is not None and getattr(value, "__code__", None) is not code
        )
        if touched and not hooked_by_torch(found, value):
            raise Wrong(f"the answer replaces {full_name}, which belongs to minidist")


def hooked_by_torch(found: Any, value: Any) -> bool:
    """Tell whether `found` is torch's hook around the method `value`: the first optimizer of a
    class puts it there.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(found, FunctionType):
        return False
    hook = torch.optim.Optimizer.profile_hook_step(lambda: None)
    return found.__code__ is hook.__code__ and any(
        value is None or cell.cell_contents is value for cell in found.__closure__ or ()
    )


def check_seen(share: Share, sent: int) -> None:
    """Raise if messages went past the witness: the traffic of the communicator below it is counted
    as well.
    """
    if sent != (seen := sum(note.kind in ("send", "barrier") for note in share.notes)):
        raise Wrong(
            f"{sent} messages were sent, but {seen} through the communicator that was given"
        )


def limit_resources() -> None:
    """Bound memory and file sizes, where the system can: then the student's process fails, and not
    the machine.
    """
    with suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (record.LARGEST, record.LARGEST))


def silence() -> None:
    """Read nothing and print nothing from now on: what a student prints is no grade, and may be
    endless.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
