"""Ranks go on together, or stop together with one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from minidist.comm import Communicator

Ready = TypeVar("Ready")


def all_or_none(comm: Communicator, work: Callable[[], Ready], *refused: type[Exception]) -> Ready:
    """Do `work` on every rank, and return this rank's result. Collective.

    Raises
    ------
    Exception
        On every rank alike, if `work` raised one of the kinds `refused` on some: the first such rank's.
    """
    problem = None
    try:
        result = work()
    except refused as error:
        problem = type(error), str(error)
    for kind, sentence in filter(None, comm.roll_call(problem)):
        raise kind(sentence)
    return result
