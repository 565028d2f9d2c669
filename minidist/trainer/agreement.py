"""Ranks go on together, or stop together with one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from minidist.comm import Communicator

Ready = TypeVar("Ready")


def all_or_none(comm: Communicator, work: Callable[[], Ready], *refused: type[Exception]) -> Ready:
    """Do `work` and return this rank's result. Collective: `work` sends nothing, or fails on all ranks alike.

    Raises
    ------
    Exception
        If `work` raises one of the kinds `refused` on any rank: every rank raises what the first of these ranks did.
    """
    problem = None
    try:
        result = work()
    except refused as error:
        problem = type(error), str(error)
    for kind, sentence in filter(None, comm.roll_call(problem)):
        raise kind(sentence)
    return result
