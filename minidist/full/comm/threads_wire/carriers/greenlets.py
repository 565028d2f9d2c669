"""Stacks that are greenlets: all in one thread, which changes stacks in half a microsecond.

    hub ──switch──▶ rank 0 ... waits ──switch──▶ hub ──switch──▶ rank 7 ...

They are started and left through a hub, a shallow stack: a greenlet that another one starts
inherits how deep that was, and Python would soon believe its recursion to be too deep.

What belongs to a thread is not the rank's own here. Of torch that is grad mode, inference mode,
autocast, the modes that see its functions, and the queue of a backward: another rank would compute
under them, and its numbers would be wrong without a word. So a rank that hands over within one of
them is refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from minidist.full.comm.errors import CommunicationError, LaunchError
from minidist.full.comm.job.background import WorkingThread, end
from minidist.full.comm.threads_wire.carriers.cooperative import LOOK, Task

try:
    import greenlet
except ImportError:  # it is asked for only where it is wanted
    greenlet = None


class Greenlets:
    """Greenlets of one thread."""

    def __init__(self) -> None:
        if greenlet is None:
            raise LaunchError(
                "engine='greenlets' needs the package greenlet: pip install greenlet, or take "
                "engine='cooperative', which does the same on threads that take turns"
            )
        self.following: Task | None = None
        self.ident = 0
        self.hub: Any = None
        self.begin: dict[Task, Callable[[], None]] = {}  # of tasks that have not begun

    def start(self, task: Task, do: Callable[[], None]) -> None:
        """Have the hub make a greenlet, once it is the task's turn."""
        self.begin[task] = do

    def run(self, first: Task, look: Callable[[], bool]) -> None:
        """Start the thread of all ranks, and wait for it: the caller's stays free for Ctrl-C."""
        self.following = first
        thread = WorkingThread(self._turn, name="ranks")
        thread.start()
        try:
            while thread.is_alive():
                thread.join(LOOK)
                if thread.is_alive() and look():
                    return
        finally:
            end([thread])

    def _turn(self) -> None:
        """Switch to whoever was let go on last, until nobody was."""
        self.ident, self.hub = threading.get_ident(), greenlet.getcurrent()
        while (task := self.following) is not None:
            self.following = None
            if task.stack is None:
                task.stack = greenlet.greenlet(self.begin.pop(task))
            task.stack.switch()

    def let(self, task: Task | None) -> None:
        """Tell the hub whom to switch to."""
        self.following = task

    def stand(self, task: Task) -> None:
        """Switch to whoever was let go on; to the hub if that task has yet to begin."""
        following = self.following
        if following is None or following.stack is None:
            self.hub.switch()
        else:
            self.following = None
            following.stack.switch()

    def check(self, task: Task) -> None:
        """Refuse if torch is in a mode that belongs to the thread."""
        torch = sys.modules.get("torch")
        if torch is not None and _modes(torch) != USUAL:
            found = dict(zip(MODES, _modes(torch), strict=True))
            inside = [
                mode for mode, usual in zip(MODES, USUAL, strict=True) if found[mode] != usual
            ]
            raise CommunicationError(
                f"{task.name} waits inside {' and '.join(inside)}, which on engine='greenlets' "
                "would hold for the other ranks too, as they share a thread: take "
                "engine='cooperative', which gives each rank its own"
            )

    def holds(self, task: Task) -> bool:
        """Compare threads: within ours, the one that runs is the one that calls."""
        return threading.get_ident() == self.ident

    def frame(self, task: Task) -> FrameType | None:
        """Return where the greenlet is; if it is the one that runs, where the thread is."""
        if task.stack is None:
            return None
        frame: FrameType | None = task.stack.gr_frame
        return frame or sys._current_frames().get(self.ident)


# what belongs to a thread, in words, and what it is in a new one
MODES = (
    "torch.no_grad()",
    "torch.inference_mode()",
    "a backward",
    "a TorchDispatchMode",
    "a TorchFunctionMode",
    "torch.autocast",
    "hooks for saved tensors",
)
USUAL = (True, False, -1, 0, 0, (False, False), None)


def _modes(torch: Any) -> tuple[object, ...]:
    internals = torch._C
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        internals._current_graph_task_id(),
        internals._len_torch_dispatch_stack(),
        internals._len_torch_function_stack(),
        (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        internals._autograd._top_saved_tensors_default_hooks(False),
    )
