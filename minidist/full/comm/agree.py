"""Debug mode: before a collective begins, the ranks tell each other what they are about to call.

    rank 0: all_reduce(float32, 1000, sum, auto)        ─┐
    rank 1: all_reduce(float32, 1001, sum, auto)        ─┴▶ MismatchError on both, with these words
                                                            and the line of each rank's program

Every call that all ranks must make together is compared here first. `all_or_none` has ranks go on
together, or stop together with one sentence.
"""

import os
from collections.abc import Callable
from typing import TypeVar

from minidist.full.comm.errors import MismatchError
from minidist.full.comm.ledger import Ranks
from minidist.full.trace.lines import source_line

Ready = TypeVar("Ready")


def debug_mode(wanted: bool | None, otherwise: bool = False) -> bool:
    """Return `wanted`; if it is None, whether the environment variable MINIDIST_DEBUG is set and
    not 0; if it is not set, `otherwise`.
    """
    said = os.environ.get("MINIDIST_DEBUG", "")
    if wanted is not None:
        return wanted
    return said != "0" if said else otherwise


def agree(comm: Ranks, operation: str, *details: object, **named: object) -> None:
    """In debug mode, raise the same MismatchError on every rank unless all ranks make the same
    call.

    Parameters
    ----------
    details, named
        What must be the same on every rank.
    """
    if comm.ledger.debug:
        same_call(comm, operation, *details, **named)


def same_call(comm: Ranks, operation: str, *details: object, **named: object) -> None:
    """Raise the same MismatchError on every rank unless all make the same call, whatever the mode:
    for calls that are made seldom, and where a difference would spoil what others hold.
    """
    words = [_word(detail) for detail in details] + [
        f"{name}={_word(detail)}" for name, detail in named.items()
    ]
    call = f"{operation}({', '.join(words)})"
    everyones = comm.all_gather_object((call, comm.ledger.status.line or source_line()))
    if any(other != call for other, _ in everyones):
        said = "; ".join(
            f"rank {rank} calls {other}" + (f" at {line}" if line else "")
            for rank, (other, line) in enumerate(everyones)
        )
        raise MismatchError(f"the ranks of {comm.name!r} do not make the same call: {said}")


def all_or_none(comm: Ranks, work: Callable[[], Ready], *refused: type[Exception]) -> Ready:
    """Do `work` and return this rank's result. Collective: `work` sends nothing, or fails on all
    ranks alike.

    Raises
    ------
    Exception
        If `work` raises one of the kinds `refused` on any rank: every rank raises what the first of
        these ranks did.
    """
    problem = None
    try:
        result = work()
    except refused as error:
        problem = type(error), str(error)
    for kind, sentence in filter(None, comm.all_gather_object(problem)):
        raise kind(sentence)
    return result


def _word(detail: object) -> str:
    return str([int(part) for part in detail]) if isinstance(detail, list | tuple) else str(detail)
