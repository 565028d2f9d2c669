"""Run a program so that each line it prints names its rank: what `python -m minidist launch` starts
on every rank.

    python -m minidist.full.launch.marked_output file.py args...        [2] step 10, loss 3.1
    python -m minidist.full.launch.marked_output -m module args...

Each launcher has an option of its own for this, and none of them keeps lines whole. Here a line is
one write, so lines of several ranks never mix. What C libraries and subprocesses print is not
marked.
"""

import atexit
import io
import os
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

from minidist.full.comm.start import launched_rank, set_as_torchrun


class MarkedLines(io.FileIO):
    """A file descriptor to which whole lines are written, with `[rank] ` in front of each."""

    def __init__(self, descriptor: int, rank: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        # tracebacks mark themselves
        self.mark, self.already = f"[{rank}] ".encode(), f"[rank {rank}] ".encode()
        self.descriptor, self.rest, self.lock = descriptor, bytearray(), threading.Lock()

    def write(self, data: Any) -> int:
        """Print the lines that are complete by now. A progress bar's end with a carriage return."""
        data = bytes(data)
        with self.lock:
            goes_on = not self.rest.endswith(b"\r")  # which may be half of "\r\n"
            self.rest += data
            if goes_on and b"\n" not in data and b"\r" not in data:
                return len(data)
            lines = bytes(self.rest).splitlines(keepends=True)
            self.rest = bytearray() if lines[-1].endswith(b"\n") else bytearray(lines.pop())
            marked = (line if line.startswith(self.already) else self.mark + line for line in lines)
            left = b"".join(marked)
            while left:
                left = left[os.write(self.descriptor, left) :]
        return len(data)

    def end(self) -> None:
        """Print the last line, which has no end yet."""
        if self.rest:
            self.write(b"\n")


def mark_output() -> None:
    """Put the rank in front of every line that is printed from now on."""
    rank = launched_rank()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        lines = MarkedLines(descriptor, rank)
        setattr(sys, name, io.TextIOWrapper(lines, "utf-8", errors="replace", write_through=True))
        atexit.register(lines.end)


def run(argv: list[str]) -> None:
    """Run a file, or `-m` a module, as Python would.

    A traceback shows the program's frames alone.
    """
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
            runpy.run_path(argv[0], run_name="__main__")
    except Exception as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in (
            __file__,
            runpy.__file__,
            "<frozen runpy>",
        ):
            frames = frames.tb_next
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        sys.exit(1)


if __name__ == "__main__":
    mark_output()
    set_as_torchrun()
    run(sys.argv[1:])
