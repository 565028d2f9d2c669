"""Stacks of a browser: Python has one thread there, and the browser sets stacks aside for it.

    loop ──▶ rank 0 ... waits: run_sync(gate) ──▶ loop ──▶ rank 7 ... opens rank 0's gate ... ──▶ loop
               ╰─ all its calls are suspended ───────────────────────────── and go on from here ─╯

WebAssembly has no threads, and what compiles Python to it, Pyodide, cannot switch stacks itself as
greenlets do. `run_sync` is the browser's own way, JavaScript Promise Integration: it suspends all
calls down to the loop that JavaScript calls Python from, until a promise is fulfilled. Meanwhile
the loop begins other calls. Each stack begins at the loop, which is shallow, so none inherits the
recursion depth of another. Pyodide keeps for each what belongs to its calls: frames, the error that
is being handled, context variables. It does not keep who watches them by `sys.settrace` or
`sys.setprofile`, so we do. Who watches the caller of `run` watches the ranks, until they say
otherwise. Such a caller is needed where ranks want to be watched: switched on and off while others
are suspended, Python 3.12 ends with a memory fault.

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

from minidist.comm.errors import CommunicationError, LaunchError
from minidist.comm.threads_wire.carriers.cooperative import LOOK, Task

IN_BROWSER = sys.platform == "emscripten"
if IN_BROWSER:
    from pyodide.ffi import can_run_sync, run_sync


class Aside:
    """The stack of one task: what it waits for, and its innermost call while it does."""

    def __init__(self, gate: asyncio.Future[None]) -> None:
        self.gate = gate
        self.frame: FrameType | None = None


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
        self.callers = _watchers()

    def start(self, task: Task, do: Callable[[], None]) -> None:
        """Have the loop call it, once it is the task's turn."""
        self.begin[task] = do

    def run(self, first: Task, look: Callable[[], bool]) -> None:
        """Let `first` go on, and suspend the caller's own stack until nobody is left."""
        self.callers = _watchers()
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
        try:
            self.begin.pop(task)()
        finally:
            _watch(*self.callers)  # who watched this task does not watch the next

    def stand(self, task: Task) -> None:
        """Be suspended until the gate is open, and shut it."""
        aside: Aside = task.stack
        aside.frame, watchers = sys._getframe(), _watchers()
        _watch(*self.callers)
        run_sync(aside.gate)
        _watch(*watchers)
        aside.gate, aside.frame = self.loop.create_future(), None
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

    def frame(self, task: Task) -> FrameType | None:
        """Return where the task is suspended; if it is the one that runs, where it asks."""
        if task is self.running:
            return sys._getframe()
        return None if task.stack is None else task.stack.frame


def _watchers() -> tuple[Any, Any]:
    """Return the functions of `sys.settrace` and `sys.setprofile`."""
    return sys.gettrace(), sys.getprofile()


def _watch(tracing: Any, profiling: Any) -> None:
    """Set them, where they are others: that takes a while."""
    if sys.gettrace() is not tracing:
        sys.settrace(tracing)
    if sys.getprofile() is not profiling:
        sys.setprofile(profiling)
