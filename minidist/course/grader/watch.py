"""Which functions an answer calls, and whether it is the answer that led to a call.

    exercise.py ─▶ functools.partial, map, a thread ─▶ minidist.full...     the answer's doing
    exercise.py ─▶ optimizer.step ─▶ torch's hooks ──▶ minidist.full...     its doing only if it handed that over

A call counts if the answer led to it. To find out, follow the frames from the call outwards, past
those of the package and of Python's own library. The answer led to the call if they reach the
student's file, or the start of a thread that the student's code started. A frame of the checks, or
of another library such as torch, ends the search: a library calls back what was registered with it,
and that was done by the package or the checks, unless the answer itself handed over a barred
function. So what an answer hands to a library is looked at, too.

Code of a barred module counts as that module wherever it runs: a text handed to `exec`, or a code
object with another file name. `Texts` recognizes it by its instructions. What stands in the
student's own file is the student's own.

`sys.setprofile` shows every Python call of a thread. An audit hook (PEP 578), which cannot be
removed, shows what would turn that off. Threads are started by a function of ours, in this process
only, which remembers which line asked for it.
"""

import _thread
import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from minidist.course.grader.contract import Note, Task, Wrong, barred
from minidist.course.texts import CHECKS, PACKAGE, Texts, dotted
from minidist.full.comm.communicator import Communicator
from minidist.full.trace.lines import STDLIB

WITNESS = "minidist.course.grader.witness"
STUDENT, LIBRARY, PYTHON = "exercise", "library", "python"
# what nobody calls by name
NOBODY = ("<module>", "__del__", "__torch_dispatch__", "__torch_function__")
STARTS = (
    "start_new_thread",
    "start_new",
    "_start_new_thread",
    "start_joinable_thread",
    "_start_joinable_thread",
)
HIDING = {
    "sys.setprofile",
    "sys.settrace",
    "sys.addaudithook",
    "sys.monitoring.register_callback",
    "gc.get_objects",
    "cpython.PyInterpreterState_New",  # another interpreter, whose calls nobody watches
    # bytes that no witness sees
    "socket.bind",
    "socket.connect",
    "socket.sendmsg",
    "socket.sendto",
}


class Returned(NamedTuple):
    """Which function of the answer came back to the checks, and whether with None."""

    name: str
    nothing: bool


class Watch:
    """What the answer to one task calls, as notes handed to `note`.

    Parameters
    ----------
    exercise, lesson : str
        The student's file; the folder of the checks. An answer may call what a program of the
        checks hands it: methods, and functions defined within functions. Those at the top of a
        module are the checks' own: one may be the answer.
    """

    def __init__(
        self, task: Task, exercise: str, lesson: str, note: Callable[[Note], None]
    ) -> None:
        self.task, self.exercise, self.lesson, self.note = task, exercise, lesson, note
        self.texts = Texts(task, exercise, lesson)
        self.calls = self.profile  # one and the same object, to be recognized
        self.barred = functools.cache(functools.partial(barred, task))
        # whether a file holds nothing that is barred, so that its calls need no look
        self.dull: dict[str, bool] = {}
        # by the id of its code: what of the witness carries data
        self.shortcuts: dict[int, str] = {}
        self.below: dict[int, str] = {}  # the same, of the wire
        self.carriers: set[str] = set()  # the names of both
        self.starters: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()
        self.owners: dict[str, str] = {}
        self.noted: set[tuple[str, str]] = set()
        self.returned: dict[int, Returned] = {}  # by thread, what came back to the checks last
        self.switching = threading.Lock()

    def begin(self, before: Set[int] = frozenset()) -> None:
        """Watch this thread and all that are started from now on. `before`: see `Texts.begin`."""
        self.texts.begin(before)
        # A function, as Python asks a hook for an attribute with each of a million events, and a
        # method takes long to say that it has none.
        sys.addaudithook(lambda event, _: self.audit(event) if event in HIDING else None)
        for module, name in itertools.product((threading, _thread), STARTS):
            if hasattr(module, name):
                setattr(module, name, self.starting(getattr(module, name)))
        self.switch(self.calls)

    def switch(self, calls: Callable[..., None] | None) -> None:
        """Have `calls`, or nobody, look at this thread's calls from now on. Python lets one thread
        switch at a time.
        """
        with self.switching:
            sys.setprofile(calls)

    def profile(self, frame: FrameType, event: str, what: Any) -> None:
        """Look at a call: the function for `sys.setprofile`, and quick with most calls, which are
        of no interest.

        To ask for a frame's code, or an id, costs most, as it is an event for audit hooks.
        """
        if event == "call":
            code, caller = frame.f_code, frame.f_back
            dull = self.dull.get(code.co_filename) and (
                code.co_name not in self.carriers
                or (id(code) not in self.shortcuts and id(code) not in self.below)
            )
            if not dull or (caller is not None and caller.f_code.co_filename == self.exercise):
                self.look(frame, code, caller)
        elif event in ("c_call", "return") and frame.f_code.co_filename == self.exercise:
            if event == "c_call":
                self.called(library_of(what), frame)
            elif frame.f_back and self.owner(frame.f_back) == CHECKS:
                name = frame.f_code.co_qualname
                made = name.removesuffix(".__init__")  # it returns None, and leaves an object
                self.returned[threading.get_ident()] = Returned(made, what is None and made == name)

    def look(self, frame: FrameType, code: CodeType, caller: FrameType | None) -> None:
        """Look at a call of Python code."""
        file, owner = code.co_filename, self.owner(frame)
        if file not in self.dull:
            known = file != "<string>" and owner not in (STUDENT, CHECKS)
            self.dull[file] = known and not self.barred(
                module_of(frame) if owner == LIBRARY else owner
            )
        foreign = owner in (STUDENT, PYTHON, LIBRARY)
        if foreign and (copied := self.texts.whose(code, frame.f_globals)):
            line = self.led(caller) or "exercise.py"
            self.note(Note(-1, "text", through=(copied,), line=line))
        if owner in (STUDENT, PYTHON) or code.co_name == "<module>":
            return
        kind = self.shortcuts.get(id(code)) or self.below.get(id(code))
        through, line, _, witnessed = self.stack(caller) if kind else ((), "", False, False)
        if kind and (id(code) in self.shortcuts or not witnessed):
            if line:
                self.note(
                    Note(
                        -1,
                        kind,
                        through=("comm.wire.inner",) if kind == "hides" else through,
                        line=line,
                    )
                )
        elif owner == CHECKS:
            self.called("" if "." in code.co_qualname else CHECKS, caller)
        elif owner == LIBRARY:
            self.called(module_of(frame), caller)
            if caller is not None and caller.f_code.co_filename == self.exercise:
                for name in self.handed(frame.f_locals.values()):
                    self.called(name, caller)
        elif (
            not owner.startswith("minidist.course")
            or caller is None
            or not self.owner(caller).startswith("minidist")
        ):
            self.called(owner, frame)  # unless it is the witness's own business

    def starting(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Return `start` so changed that a thread's calls are watched, and that it remembers the
        student's line.
        """

        def watched(function: Callable[..., Any], *rest: Any, **named: Any) -> Any:
            def begin(*arguments: Any, **options: Any) -> None:
                self.switch(self.calls)
                function(*arguments, **options)

            thread = getattr(function, "__self__", None)
            if line := self.stack(sys._getframe(1))[1]:
                if not isinstance(thread, threading.Thread) or threading.getprofile() is not None:
                    self.forbid("_thread.start_new_thread", line)
                else:
                    self.starters[thread] = line
            return start(begin, *rest, **named)

        return watched

    def audit(self, event: str) -> None:
        """Forbid what would hide calls. An audit hook calls this."""
        frame = sys._getframe(2)
        ours = (
            frame.f_code is Watch.switch.__code__ and self.owner(frame.f_back or frame) == __name__
        )
        if (line := self.stack(frame)[1]) and not ours:
            self.forbid(event, line)

    def forbid(self, what: str, line: str) -> None:
        """Note what an answer tried, and prevent it."""
        self.note(Note(-1, "hides", through=(what,), line=line))
        raise PermissionError(f"{what} is not for answers: it hides from the grader what they do")

    def called(self, name: str, frame: FrameType | None) -> None:
        """Note a call of the module `name`, if the task bars it and the answer led to `frame`."""
        if self.barred(name) and (line := self.led(frame)) and (name, line) not in self.noted:
            self.noted.add((name, line))
            self.note(Note(-1, "call", through=(name,), line=line))

    def owner(self, frame: FrameType) -> str:
        """Return whose code a frame runs: the name of a module of the package, or `STUDENT`,
        `CHECKS`, ...
        """
        file = frame.f_code.co_filename
        owner = self.owners.get(file)
        if owner is None:
            if file == "<string>":  # as dataclasses write
                return module_of(frame) if module_of(frame).startswith("minidist") else PYTHON
            package = dotted(Path(file))
            library = PYTHON if "-packages" not in file else LIBRARY
            places = {
                self.exercise: STUDENT,
                self.lesson: CHECKS,
                str(PACKAGE): package,
                STDLIB: library,
                "<": PYTHON,
            }
            owner = next(
                (owner for place, owner in places.items() if file.startswith(place)), LIBRARY
            )
            self.owners[file] = owner
        return owner

    def stack(self, frame: FrameType | None) -> tuple[tuple[str, ...], str, bool, bool]:
        """Return how the student's file came to a frame: four answers.

        The package's modules between the two; the line of the file, or nothing; whether a barrier
        lies between; and whether the witness does.
        """
        through: dict[str, None] = {}
        barrier = witnessed = False
        while frame is not None and (owner := self.owner(frame)) != STUDENT:
            barrier |= frame.f_code is Communicator.barrier.__code__
            witnessed |= owner == WITNESS
            if owner.startswith("minidist") and not owner.startswith("minidist.course"):
                through.setdefault(owner)
            frame = frame.f_back
        return tuple(through), self.line(frame), barrier, witnessed

    def led(self, frame: FrameType | None) -> str:
        """Return the line of the answer that led to a frame; nothing if the checks, a library's
        hook or an import did.

        Most calls are those of the checks, so this has to be quick.
        """
        while frame is not None and (owner := self.owner(frame)) != STUDENT:
            if owner in (CHECKS, LIBRARY) or (owner != PYTHON and frame.f_code.co_name in NOBODY):
                return ""
            frame = frame.f_back
        return self.line(frame)

    def line(self, frame: FrameType | None) -> str:
        """Return the place of a frame of the student's file; without one, the line that started
        this thread.
        """
        if frame is None:
            return self.starters.get(threading.current_thread(), "")
        return f"exercise.py:{frame.f_lineno} in {frame.f_code.co_name}"

    def handed(self, values: Iterable[Any], depth: int = 3) -> Iterator[str]:
        """Yield the modules of the functions and classes among `values`, and in objects of the
        student's classes.
        """
        for value in values if depth else ():
            kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
            own: list[Iterable[Any]] = [
                vars(kind).values() for kind in kinds if kind.__module__ == STUDENT
            ]
            if isinstance(value, functools.partial):
                own.append([value.func])
            elif isinstance(value, MethodType | staticmethod | classmethod):
                own.append([value.__func__])
            elif isinstance(value, FunctionType):
                yield str(value.__globals__.get("__name__", ""))
                yield self.texts.whose(value.__code__, value.__globals__)
            elif isinstance(value, type):
                yield from (kind.__module__ for kind in kinds)
            elif own:
                own.append(vars(value).values())
            yield from self.handed(itertools.chain(*own), depth - 1)


def module_of(frame: FrameType) -> str:
    """Return the name of the module whose globals a frame uses."""
    return str(frame.f_globals.get("__name__", ""))


def library_of(function: Any) -> str:
    """Return the name of the module to which a function in C belongs, or the type whose method it
    is.
    """
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, ModuleType):
        return str(function.__module__)
    return (owner if isinstance(owner, type) else type(owner)).__module__


class Handed(ModuleType):
    """The exercise as the checks' programs see it. What they take is looked at: it may be the
    package's own.
    """

    def __init__(self, exercise: ModuleType, watch: Watch) -> None:
        super().__init__(exercise.__name__)
        self._exercise, self._watch = exercise, watch

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._exercise, name):
            raise Wrong(f"exercise.py has no {name}: the handout does, and the checks call it")
        value = getattr(self._exercise, name)
        for module in self._watch.handed([value]):
            if barred(self._watch.task, module):
                self._watch.note(Note(-1, "call", through=(module,), line=f"{name} of exercise.py"))
        return value
