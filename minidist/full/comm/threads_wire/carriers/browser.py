"""Stacks of a browser: Python has one thread there, and the browser sets stacks aside for it.

    loop ──▶ rank 0 ... waits: run_sync(gate) ──▶ loop ──▶ rank 7 ... opens rank 0's gate ... ──▶ loop
               ╰─ all its calls are suspended ───────────────────────────── and go on from here ─╯

WebAssembly has no threads, and what compiles Python to it, Pyodide, cannot switch stacks itself.
`run_sync` is the browser's own way, JavaScript Promise Integration: it suspends all
calls down to the loop that JavaScript calls Python from, until a promise is fulfilled. Meanwhile
the loop begins other calls. Each stack begins at the loop, which is shallow, so none inherits the
recursion depth of another, and Pyodide gives each what Python keeps for a thread.

What C has on a suspended stack, however, is overwritten by the next one, and put back only as it
goes on. So nobody may walk through its frames: reports are given copies. Python itself walks through
all frames when `sys.settrace` or `sys.setprofile` begins to watch a program that nobody watched, or
ends to. So whoever wants to watch ranks watches the caller of `run` first, and they begin watched.

Nothing interrupts a rank that computes for ever, not even `limit`: whoever shows a page lets Python
run in a worker, and ends that.

(WebAssembly JavaScript Promise Integration; Pyodide's documentation of `pyodide.ffi.run_sync`.)
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from minidist.full.comm.errors import CommunicationError, LaunchError
from minidist.full.comm.threads_wire.carriers.cooperative import LOOK, Task

IN_BROWSER = sys.platform == "emscripten"
if IN_BROWSER:
    from pyodide.ffi import can_run_sync, run_sync


class Call:
    """One call of a suspended stack, as reports read frames."""

    def __init__(self, frame: FrameType, back: Call | None) -> None:
        self.f_code, self.f_lineno, self.f_back = frame.f_code, frame.f_lineno, back


class Aside:
    """The stack of one task: what it waits for, and its calls while it does, innermost first."""

    def __init__(self, gate: asyncio.Future[None]) -> None:
        self.gate = gate
        self.calls: list[FrameType] = []


class Browser:
    """Stacks of one thread, all but one of which are suspended."""

    def __init__(self) -> None:
        if not can_run_sync():
            raise LaunchError(
                "simulated ranks take turns here by JavaScript Promise Integration (Chrome from "
                "137, Firefox from 153, Safari from 27), and this browser lacks it, or called "
                "Python in a way that cannot be suspended: use one that has it, and "
                "pyodide.runPythonAsync"
            )
        self.loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self.loop.create_future()
        self.begin: dict[Task, Callable[[], None]] = {}  # of tasks that have not begun
        self.running: Task | None = None
        self.callers: tuple[Any, Any] = (None, None)  # who watches the caller of `run`

    def start(self, task: Task, do: Callable[[], None]) -> None:
        """Have the loop call it, once it is the task's turn."""
        self.begin[task] = do

    def run(self, first: Task, look: Callable[[], bool]) -> None:
        """Let `first` go on, and suspend the caller's own stack until nobody is left."""
        self.callers = sys.gettrace(), sys.getprofile()
        self.let(first)
        while not self.over.done():
            run_sync(asyncio.wait([self.over], timeout=LOOK))
            if not self.over.done() and look():
                return

    def let(self, task: Task | None) -> None:
        """Open the task's gate; if it has none, it has not begun."""
        self.running = None
        if task is None:
            self.over.set_result(None)
        elif task.stack is None:
            task.stack = Aside(self.loop.create_future())
            self.loop.call_soon(self._begin, task)
        else:
            task.stack.gate.set_result(None)

    def _begin(self, task: Task) -> None:
        self.running = task
        _watch(*self.callers)
        try:
            self.begin.pop(task)()
        finally:
            _watch(None, None)  # another stack will be given what Python kept for this one

    def stand(self, task: Task) -> None:
        """Be suspended until the gate is open, and shut it."""
        aside: Aside = task.stack
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            aside.calls.append(frame)
            frame = frame.f_back
        run_sync(aside.gate)
        aside.gate = self.loop.create_future()
        aside.calls.clear()
        self.running = task

    def check(self, task: Task) -> None:
        """Refuse if JavaScript stands between the task's calls, as it cannot be suspended."""
        if not can_run_sync():
            raise CommunicationError(
                f"{task.name} waits inside a function that JavaScript called, which cannot be "
                "suspended: wait outside of it"
            )

    def holds(self, task: Task) -> bool:
        """Tell whether the task was let go on: until it is suspended, the loop calls nobody."""
        return self.running is task

    def frame(self, task: Task) -> Any:
        """Return where the task is suspended; if it is the one that runs, where it asks."""
        if task is self.running:
            return sys._getframe()
        call: Call | None = None
        for frame in reversed([] if task.stack is None else task.stack.calls):
            call = Call(frame, call)
        return call


def _watch(tracing: Any, profiling: Any) -> None:
    """Set what watches this stack; where it is the same, Python need not hear of it."""
    if sys.gettrace() is not tracing:
        sys.settrace(tracing)
    if sys.getprofile() is not profiling:
        sys.setprofile(profiling)
