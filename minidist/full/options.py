"""How an option is declared, once for the library and the command line, and how numbers are read.

Numbers come from flags, the environment and files. A number that is read can be counted with: it
is finite, and a whole one fits into 64 bits. `nan`, `1e999`, `²`, a page of digits and true are
refused. Messages are the end of a sentence, `must be at least 1`: the reader names what it read.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import Field, field, fields
from typing import Any, NamedTuple, TypeVar

Number = TypeVar("Number", int, float)
NUMBERS = {int: "a whole number", float: "a number"}
MOST = (1 << 63) - 1  # what 64 bits hold
SHOWN = 60  # characters of a wrong value


class Limit(NamedTuple):
    """What an option may be, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


def one_of(*choices: str) -> Limit:
    """Limit an option to some words; an empty string stands for its default."""
    return Limit(f"one of {', '.join(filter(None, choices))}", lambda value: value in choices)


def up_to(most: int) -> Limit:
    """Limit an option to what ends in a time that one waits for."""
    return Limit(f"from 0 to {most:,}", lambda value: 0 <= value <= most)


AT_LEAST_ONE = Limit("at least 1", lambda value: value >= 1)
NOT_NEGATIVE = Limit("0 or more", lambda value: 0 <= value < math.inf)
POSITIVE = Limit("above 0", lambda value: 0 < value < math.inf)
FRACTION = Limit("from 0 to below 1", lambda value: 0 <= value < 1)
# what clocks and timers take
SECONDS = Limit("above 0 and at most 1e8 seconds", lambda value: 0 < value <= 1e8)
RANKS = Limit("from 1 to 10,000", lambda value: 1 <= value <= 10_000)


class Needs(NamedTuple):
    """What else a run must have for an option to have an effect: another option, in words and as a
    test of its value.
    """

    words: str
    option: str
    holds: Callable[[Any], bool]


def option(
    default: Any,
    help: str,
    limit: Limit | None = None,
    *,
    needs: Needs | None = None,
    exact: bool = True,
    kind: Any = None,
    flag: bool = True,
) -> Any:
    """Declare a field of a dataclass of options: once, for the library, the command line and the
    planner.

    Parameters
    ----------
    help
        The sentence that `--help` shows.
    limit, needs
        What the value may be, and what else the run must have if it is not the default.
    exact
        False: the option changes what is sent, so parameters are not those of the serial run.
    kind
        As what a command line reads the value; by default the type of the field.
    flag
        False: no command line can say it.
    """
    said = {"help": help, "limit": limit, "needs": needs, "exact": exact, "kind": kind}
    return field(default=default, metadata={**said, "flag": flag})


def flags_of(options: Any) -> list[Field[Any]]:
    """Return the fields of a dataclass of options, or of one of its objects, that a command line
    can say.
    """
    return [each for each in fields(options) if each.metadata["flag"]]


def read_number(written: object, kind: type[Number], limit: Limit | None = None) -> Number:
    """Return `written`, a text or a number, as a number of this kind.

    Raises
    ------
    ValueError
        If it is none, too large to be counted with, or beyond the limit; the message says what it
        must be.
    """
    wrong = f"must be {NUMBERS[kind]}"
    if isinstance(written, bool) or not isinstance(
        written, str | int if kind is int else str | int | float
    ):
        raise ValueError(wrong)
    try:
        number = kind(written)
    except OverflowError:
        raise ValueError("is too large") from None
    except ValueError:
        raise ValueError(wrong) from None
    if number != number:
        raise ValueError(wrong)
    if abs(number) > (MOST if kind is int else sys.float_info.max):
        raise ValueError("is too large")
    if limit is not None and not limit.holds(number):
        raise ValueError(f"must be {limit.words}")
    return number


def shown(value: object) -> str:
    """Return a value in a few characters, however long it is."""
    if isinstance(value, int) and abs(value) > MOST:  # Python refuses to write very long ones
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
