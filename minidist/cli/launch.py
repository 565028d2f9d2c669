"""`python -m minidist launch -n 4 file.py`: start ranks on this machine, whichever MPI is
installed.

It finds the mpirun of the MPI that this Python speaks (under another MPI's, ranks start but do not
see each other), sets what that mpirun needs, and marks each line of output with its rank. When a
time limit passes or Ctrl-C comes, it ends the whole job and leaves no process behind. A job that
loses a rank can start again (`full/launch/restarts.py`). The exit status is the job's.
"""

import argparse
import os
import signal
import sys
import threading
import warnings
from functools import partial
from pathlib import Path

from minidist.full.comm.errors import LaunchError
from minidist.full.comm.start import restarts
from minidist.full.launch.allocation import allocation_here, machines_here, run_on_machines
from minidist.full.launch.jobs import Outcome, run_job, running, send_signal
from minidist.full.launch.leaving import WARNINGS
from minidist.full.launch.mpirun import environment, find_mpirun, over_mpi, torchrun
from minidist.full.launch.parser import Parser, flag_of
from minidist.full.launch.replacing import run_replacing
from minidist.full.launch.restarts import Restarts, run_until_done
from minidist.full.options import NOT_NEGATIVE, RANKS, SECONDS

RANK = "minidist.full.launch.marked_output"  # what each rank runs
ENDS = () if sys.platform == "win32" else (signal.SIGHUP, signal.SIGQUIT)


def main(argv: list[str]) -> int:
    """Start ranks as the command line says; return the job's exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.program[:1] == ["--"]:  # by which others end their own options
        del options.program[0]
    if not options.program:
        parser.error("name a program: minidist launch -n 4 file.py")
    try:
        restarts = restarts_of(options)
        by_itself = options.wire is None and not options.replace and options.ranks_per_gpu is None
        if options.replace and (machines := machines_here()) > 1:
            raise LaunchError(
                f"--replace starts all ranks on this machine, and the SLURM job has {machines}: leave "
                "it out, and ask for a machine more than you need, or take one machine"
            )
        options.allocation = allocation_here(options.ranks) if by_itself else None
        if options.allocation is not None and options.spares:
            raise LaunchError(
                f"--spares {options.spares}: in a SLURM job machines are spare that it has beyond "
                "those it needs: ask for more --nodes, and leave --spares out"
            )
        # once before anything starts
        if options.replace or options.allocation is not None:
            member_command(options)
        else:
            command_line(options)
    except LaunchError as error:
        print(f"minidist launch: {error}", file=sys.stderr)
        return 2
    options.warnings = set()
    previous = {number: signal.signal(number, partial(warn, options)) for number in WARNINGS}
    for number in ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            previous[number] = signal.signal(number, end)
    try:
        if options.replace:
            command, env = member_command(options)
            outcome = run_replacing(command, env, restarts, options.timeout, options.warnings)
        else:
            outcome = run_anew(options, restarts)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if outcome.timed_out:
        print(
            f"minidist launch: ended after {options.timeout:g} s, as --timeout says",
            file=sys.stderr,
        )
    return outcome.returncode


def restarts_of(options: argparse.Namespace) -> Restarts:
    """Return how often the job may start again, and on what.

    Raises
    ------
    LaunchError
        If numbers or options do not fit each other.
    """
    if options.spares and not (options.max_restarts or options.replace):
        raise LaunchError(
            f"--spares {options.spares} would never be used: allow restarts with --max-restarts, or "
            "--replace"
        )
    if options.replace and options.wire == "mpi":
        raise LaunchError("--replace starts ranks of gloo or NCCL by itself: leave --wire mpi out")
    return Restarts(
        options.ranks,
        options.max_restarts,
        options.spares,
        options.min_ranks,
        options.replica,
    )


def run_anew(options: argparse.Namespace, restarts: Restarts) -> Outcome:
    """Run the job here, or on the machines of a SLURM job, until it is done or may not start again."""
    allocation = options.allocation
    if allocation is None:
        return run_until_done(partial(start, options), restarts)

    def start_there(nodes: list[str], ranks: int, restart: int) -> Outcome:
        command = [*allocation.command(nodes, ranks), "-m", RANK, *program_of(options)]
        env = {
            **os.environ,
            **allocation.environment(nodes),
            **counts(options, restart),
            **limit_of(options),
        }
        return ended(
            options, run_job(command, env=env, timeout=options.timeout, hear=allocation.hear)
        )

    return run_on_machines(start_there, allocation, restarts)


def counts(options: argparse.Namespace, restart: int) -> dict[str, str]:
    """Return what ranks are told of their job. Who has started this launcher again counts, too."""
    return {"MINIDIST_RESTARTS": str(restarts() + restart), "MINIDIST_RANKS": str(options.ranks)}


def ended(options: argparse.Namespace, outcome: Outcome) -> Outcome:
    """Return how a start ended; whoever was asked to leave does not start again."""
    if options.warnings:
        raise SystemExit(outcome.returncode)
    return outcome


def start(options: argparse.Namespace, ranks: int, restart: int) -> Outcome:
    """Run the job once, and tell its ranks how often it was started before."""
    command, env = command_line(argparse.Namespace(**vars(options) | {"ranks": ranks}))
    counted = env | counts(options, restart)
    return ended(options, run_job(command, env=counted, timeout=options.timeout))


def warn(options: argparse.Namespace, number: int, _: object = None) -> None:
    """Hand a scheduler's warning on to the ranks; the second SIGTERM ends the job.

    mpirun and torchrun get none: they would end the ranks at once. srun hands it on, as its ranks are
    no processes of ours.
    """
    if number == signal.SIGTERM and number in options.warnings:
        sys.exit(128 + signal.SIGTERM)
    options.warnings.add(number)
    if not (ranks := running(RANK) | running("srun")):
        name = signal.Signals(number).name
        print(f"minidist launch: {name} has come while no rank runs: the job ends", file=sys.stderr)
        sys.exit(128 + number)
    send_signal(ranks, signal.Signals(number))
    if number == signal.SIGTERM:
        timer = threading.Timer(options.grace, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()


def end(number: int, _: object = None) -> None:
    """End the job, whose terminal is gone, or that somebody wants to end."""
    sys.exit(128 + number)


def member_command(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs the program as one member of a job, and its environment."""
    started = options.ranks + options.spares
    return [sys.executable, "-m", RANK, *program_of(options)], {
        **environment(),
        **counts(options, 0),
        **limit_of(options),
        **sharing(options.ranks_per_gpu, started),
    }


def sharing(each: int | None, ranks: int) -> dict[str, str]:
    """Return what tells ranks that `each` of them share a GPU, if they do; LaunchError if they
    cannot.
    """
    if each is None:
        return {}
    # here, because it imports torch
    from minidist.full.comm.torch_wire.gpus import SHARING, count_gpus, share_gpus

    try:
        # one sentence, not one from each rank
        share_gpus(each, count_gpus(), ranks)
    except LaunchError as error:
        raise LaunchError(str(error).replace(f"{SHARING}=", "--ranks-per-gpu ")) from None
    return {SHARING: str(each)}


def program_of(options: argparse.Namespace) -> list[str]:
    """Return the program and its words; LaunchError if there is no such file, or no Python in it:
    no machine is at fault, and no restart would help.
    """
    program: list[str] = ["-m", *options.program] if options.module else options.program
    if program[0] != "-m" and not os.path.isfile(program[0]):
        raise LaunchError(f"there is no file {program[0]}")
    if program[0].endswith(".py"):
        with warnings.catch_warnings(action="ignore"):
            try:
                compile(Path(program[0]).read_bytes(), program[0], "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                raise LaunchError(f"{program[0]} is not Python: {error}") from None
    return program


def limit_of(options: argparse.Namespace) -> dict[str, str]:
    """Return what tells ranks of `--limit`."""
    return {} if options.limit is None else {"MINIDIST_LIMIT": str(options.limit)}


def command_line(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs the program on so many ranks, and its environment.

    Raises
    ------
    LaunchError
        If there is no such file, no mpirun that fits, or the ranks cannot share GPUs as asked.
    """
    rank = ["-m", RANK, *program_of(options)]
    if options.ranks_per_gpu is not None and options.wire == "mpi":
        raise LaunchError(
            "--ranks-per-gpu is for ranks of NCCL, which torchrun starts: leave --wire mpi out"
        )
    extra = limit_of(options) | sharing(options.ranks_per_gpu, options.ranks)
    if options.wire == "torch" or options.ranks_per_gpu is not None:
        # torchrun puts Python in front of the ranks' program itself
        return [*torchrun(options.ranks), *rank], environment() | extra
    mpirun = find_mpirun()
    command = [mpirun.path, "-n", str(options.ranks), sys.executable, *rank]
    return command, environment(mpirun) | extra | over_mpi()


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="minidist launch", description="Run a program on several ranks here.")
    seconds = flag_of(float, SECONDS)
    parser.add_argument(
        "-n", "-np", "--ranks", type=flag_of(int, RANKS), default=2, help="how many ranks (2)"
    )
    parser.add_argument("--wire", choices=["mpi", "torch"], help="mpirun or torchrun (mpi)")
    share = (
        "how many ranks share a GPU, by torchrun and NCCL 2.30: it shows what is right, not what "
        "is fast"
    )
    parser.add_argument("--ranks-per-gpu", type=flag_of(int, RANKS), help=share)
    parser.add_argument(
        "--limit",
        type=seconds,
        help="seconds an operation may wait before who waits for whom is told",
    )
    parser.add_argument(
        "--timeout",
        type=seconds,
        help="seconds the whole job, or each start of it, may take before it is ended",
    )
    number, ranks = flag_of(int, NOT_NEGATIVE), flag_of(int, RANKS)
    parser.add_argument(
        "--max-restarts",
        type=number,
        default=0,
        help="how often a job that has lost a rank starts again (0)",
    )
    parser.add_argument(
        "--spares", type=number, default=0, help="how often what was lost can be replaced (0)"
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="the others go on at once, and what was lost is started alone: for train",
    )
    parser.add_argument(
        "--min-ranks", type=ranks, default=1, help="the fewest ranks to go on with (1)"
    )
    parser.add_argument(
        "--replica",
        type=ranks,
        default=1,
        help="ranks that are lost together: tp * pp * cp of a layout (1)",
    )
    parser.add_argument(
        "--grace",
        type=seconds,
        default=10.0,
        help="seconds that ranks have to save and leave after SIGTERM (10)",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="the program is a module's name"
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="file.py ...", help="and its arguments"
    )
    return parser
