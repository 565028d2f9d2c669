"""`python -m minidist COMMAND`."""

from __future__ import annotations

import importlib
import os
import sys
from io import TextIOWrapper

from minidist import __version__
from minidist.full.launch.imports import quick_imports

LIBRARIES = ("torch", "safetensors", "mpi4py")  # without which a part of the commands works
ENOUGH = 128 + 13  # the exit status of a program that SIGPIPE ends
COMMANDS = {
    "train": "train a GPT, under python, mpirun or torchrun",
    "stages": "the same run under DDP and ZeRO 1, 2, 3: what each holds, sends and costs",
    "layouts": "the same run on several layouts of the ranks: data, tensor and pipeline parallelism in "
    "pairs",
    "losses": "the same run in ways that change the numbers: compressed, in sites, stale",
    "picture": "draw what train and stages have measured: losses, and bytes by stage",
    "export": "make a Hugging Face Llama of a checkpoint",
    "bench": "measure against MPI, gloo and torch, in one run",
    "plan": "which layout, how long, how much: before anything is rented",
    "launch": "start a program on several ranks, with the right mpirun",
    "grade": "grade an exercise of the course",
    "course": "build the course's handout",
    "health": "which rank's machine is not fit, before a run starts",
    "doctor": "find out what this machine can run, and what to mend",
}
ELSEWHERE = {  # in rooms of their own
    "bench": "minidist.bench",
    "course": "minidist.course.course",
    "grade": "minidist.course.grade",
    "health": "minidist.full.launch.health",
    "layouts": "minidist.cli.variants.layouts",
    "losses": "minidist.cli.variants.losses",
    "plan": "minidist.cli.plan.command",
    "stages": "minidist.cli.variants.stages",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command; return its exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="replace")  # a console that has no arrows and lines
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = [f"  {name:<8} {what}" for name, what in COMMANDS.items()]
        print(
            "python -m minidist COMMAND ...   (each has its own --help; or --version)\n"
            + "\n".join(lines)
        )
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"minidist {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        from minidist.full.launch.parser import nearest  # here, because only a mistake needs it

        known = nearest(name, COMMANDS) or f"choose one of {', '.join(COMMANDS)}"
        print(f"minidist: there is no command {name!r}: {known}", file=sys.stderr)
        return 2
    try:
        with quick_imports():
            command = importlib.import_module(ELSEWHERE.get(name, f"minidist.cli.{name}"))
        status = int(command.main(rest))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads what is printed, such as `head`, has seen enough
        # or the exit would fail to flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ENOUGH
    except ModuleNotFoundError as error:
        if error.name not in LIBRARIES:
            raise  # a mistake, and not an installation without its dependencies
        told = f"needs the library {error.name}, which is not installed: pip install {error.name}"
        print(f"minidist {name} {told}", file=sys.stderr)
        return 2
    return status


def open_closed_streams() -> None:
    """Let standard streams that are closed, as a daemon may leave them, lead to the null device: a
    file or a socket would take their numbers.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


if __name__ == "__main__":
    sys.exit(main())
