"""What goes wrong between ranks, by name. Each message says what, with values, and the fix.

`whole` and `ranks_of` refuse what is no whole number, and no group of ranks.
"""

import operator
from collections.abc import Iterable
from typing import Any

SAME = (
    "give all ranks the same shape and dtype (MINIDIST_DEBUG=1 names each rank's call of a "
    "collective, and its line)"
)


class CommunicationError(RuntimeError):
    """Any failure of messages between ranks."""


class DeadlockError(CommunicationError):
    """No rank can go on: each waits for a message that can no longer come."""


class LimitError(CommunicationError):
    """A rank has waited for another one longer than an operation may."""


class MismatchError(CommunicationError):
    """The two ends of a message, or the ranks of a collective, disagree on what they are doing."""


class RankFailed(CommunicationError):
    """Another rank failed, so this one stops. The other one's error is the one to read."""


class LaunchError(CommunicationError):
    """The program was started in a way that cannot work."""


class QuorumError(CommunicationError):
    """Too few members of a job are left, or can see each other, for it to go on."""


def different_bytes(*ends: tuple[int, int]) -> MismatchError:
    """Return the error of two ranks that bring to shared memory what is not alike: (rank, bytes)."""
    (first, its), (second, others) = sorted(ends)
    return MismatchError(
        f"rank {first} brings {its} bytes to a collective in shared memory, rank {second} brings "
        f"{others}: {SAME}"
    )


def different_dtypes(
    sender: int, sent: str, receiver: int, received: str, where: str
) -> MismatchError:
    """Return the error of a message whose bytes its receiver would read as other numbers."""
    return MismatchError(
        f"rank {sender} sends {sent} to rank {receiver}, which receives {received} ({where}): "
        "give both the same dtype"
    )


def whole(name: str, value: Any, least: int | None = None) -> int:
    """Return a whole number, numpy's too, as Python's.

    Raises
    ------
    TypeError
        If it is none. Not even 1.0 is: MPI would cut 1.5 down to it, and meet another message.
    ValueError
        If it is less than the `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be a whole number") from None
    if least is not None and number < least:
        raise ValueError(f"{name}={number} must be at least {least}")
    return number


def ranks_of(group: str, ranks: Iterable[Any], size: int) -> list[int]:
    """Return the ranks of a group, of `size` that there are.

    Raises
    ------
    TypeError, ValueError
        If one is no whole number or does not exist, or is named twice.
    """
    named = [whole("rank", rank) for rank in ranks]
    if len({*named} & {*range(size)}) < len(named):
        raise ValueError(
            f"the ranks {named} of {group!r} must be different ones, from 0 to {size - 1}"
        )
    return named
