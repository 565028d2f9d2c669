"""A Python that has imported torch, and forks: a command that begins with `warm(...)` starts sooner
than by `python`.

To import torch takes two seconds of a core, and hundreds of the processes that tests start begin
with that.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import math
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from minidist.full.launch.imports import quick_imports
from minidist.full.launch.standin import STAND_IN, end_with, fork_ranks

# What programs may be given as their Python, by this variable: they start others by it
PYTHON = "WARM_PYTHON"
AS_PYTHON = """#!{python} -IS
import os, sys
if sys.argv[1].startswith("-I"):  # bare Python, for which nothing is imported
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
sys.argv.insert(1, {socket!r})
{stand_in}"""
START = "import warm; program = warm.serve(); program()"
# what a kernel would say before it imports matplotlib
INLINE = "module://matplotlib_inline.backend_inline"
# The second is imported by the first optimizer of a process, and takes as long as torch
NEEDED = ("torch.distributed.run", "torch._dynamo", "minidist.full", "minidist.cli.train")


@functools.cache
def warm(path: str, *more: str) -> list[str]:
    """Return what a command begins with, for programs that have `path` as PYTHONPATH and may import
    `more` modules.

    The process that forks them is started with the first call, and ends with this one.
    """
    folder = tempfile.TemporaryDirectory(prefix="warm-")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "MPLBACKEND": INLINE}
    options = {
        "cwd": folder.name,
        "env": environment,
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
    }
    server = subprocess.Popen([sys.executable, "-c", START, *more], **options)
    atexit.register(folder.cleanup)
    atexit.register(server.communicate)
    assert server.stdout.read(1) == b".", "it imports what tests need, and listens"
    socket = str(Path(folder.name, "socket"))
    file = Path(folder.name, "python")
    file.write_text(AS_PYTHON.format(python=sys.executable, socket=socket, stand_in=STAND_IN))
    file.chmod(0o755)
    return [sys.executable, "-I", "-S", "-c", STAND_IN, socket]


def executable(command: list[str]) -> str:
    """Return the path of a program that is what such a `command` is, for who takes a path alone."""
    return str(Path(command[-1]).with_name("python"))


def serve() -> Callable[[], object]:
    """Fork a process for each stand-in that connects. Returns in such a fork, with the program that
    it is to run.
    """
    with quick_imports():
        for name in (*NEEDED, *sys.argv[1:]):
            importlib.import_module(name)
    end_with(0)  # the other end of standard input is whoever has started this process
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("socket")
    listener.listen(100)
    os.write(1, b".")
    arguments = fork_ranks(listener, math.inf, lambda others: None)
    assert arguments is not None
    return functools.partial(run, arguments)


def run(arguments: list[str]) -> None:
    """Run a program as Python would: `-m module ...`, `-c code` or `program.py ...`, after `-u`."""
    sys.executable = os.environ.get(PYTHON, sys.executable)
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        arguments = arguments[1:]
    if arguments[0] == "-c":
        sys.argv, sys.path[:0] = arguments[:1] + arguments[2:], [""]
        exec(arguments[1], vars(sys.modules["__main__"]))
    elif arguments[0] == "-m":
        sys.argv, sys.path[:0] = arguments[1:], [os.getcwd()]
        sys.modules.pop(arguments[1], None)  # or it would be twice there, which is warned of
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = arguments, [str(Path(arguments[0]).parent)]
        runpy.run_path(arguments[0], run_name="__main__")
