"""What commands that run on every rank share: the ranks start together, and a user's mistake stops
all of them.
"""

import os
import sys
from collections.abc import Callable

from minidist.full.checkpoint.store import CheckpointError
from minidist.full.comm import Communicator, LaunchError, init
from minidist.full.comm.agree import Ready, all_or_none
from minidist.full.comm.start import launched_rank
from minidist.full.data.text import TextError
from minidist.full.trainer.config import ConfigError
from minidist.full.trainer.flags import HelpAsked

# every other kind is a bug
USER_ERRORS = (ConfigError, TextError, CheckpointError, FloatingPointError)
INTERRUPTED, NOBODY_READS = 130, 141  # exit statuses, as of a shell


class StopAll(Exception):
    """Every rank stops, and rank 0 says why: the text, and the exit status."""


def on_all_ranks(command: str, program: Callable[[Communicator], int]) -> int:
    """Run `program` as one of the ranks that were started.

    Return its exit status, or 2 if there are none.
    """
    try:
        comm = init()
    except LaunchError as error:
        if launched_rank() == "0":
            print(f"minidist {command}: {error}", file=sys.stderr)
        return 2
    try:
        return program(comm)
    except (KeyboardInterrupt, BrokenPipeError) as error:
        if comm.size > 1:
            raise  # the other ranks have to end as well
        # `| head` has seen enough; Python would complain at exit
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return NOBODY_READS
        print(f"minidist {command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def stopping_together(command: str, comm: Communicator, program: Callable[[], int]) -> int:
    """Run `program`; where `together` stops it, have rank 0 say why, and return that exit
    status.
    """
    try:
        return program()
    except StopAll as stop:
        text, status = stop.args
        if comm.rank == 0:
            print(
                f"minidist {command}: {text}" if status else text,
                file=sys.stderr if status else None,
                flush=True,
            )
        return int(status)


def together(comm: Communicator, work: Callable[[], Ready]) -> Ready:
    """Do `work` on every rank; if it fails on any with a user's mistake, stop all ranks with that
    one sentence.
    """
    try:
        return all_or_none(comm, work, HelpAsked, *USER_ERRORS)
    except (HelpAsked, *USER_ERRORS) as error:
        raise StopAll(str(error), 0 if isinstance(error, HelpAsked) else 2) from None
