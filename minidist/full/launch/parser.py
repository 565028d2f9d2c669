"""The command line of the commands that run as one process: a mistake is one sentence, and status
2.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from minidist.full.options import Limit, Number, read_number, shown

ALIKE = 0.6  # of two names, as difflib counts: a letter too many, or two that have changed places
ALIKE_IN_HELP = 0.85  # of a name and words of a help text, where more is found by chance


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong without printing all options first, and names the flag that
    may be meant.
    """

    given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and keep the words for `error`."""
        self.given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Leave with status 2."""
        command = self.prog.removeprefix("python -m ")
        print(f"{command}: {self.fault(message)}", file=sys.stderr)
        raise SystemExit(2)

    def fault(self, message: str) -> str:
        """Return what argparse says as a sentence.

        A flag that is missing is often one that was misspelt.
        """
        unknown = [word for word in self.given if word.startswith("--") and not self.knows(word)]
        if unknown and message.startswith(
            ("unrecognized arguments", "the following arguments are required")
        ):
            return unknown_flag(unknown[0], self)
        return f"{message.removeprefix('argument ')}; see --help"

    def knows(self, word: str) -> bool:
        """Tell whether a word is a flag, or the beginning of one."""
        name = word.partition("=")[0]
        known = self._option_string_actions
        return name in known or (self.allow_abbrev and any(each.startswith(name) for each in known))


def unknown_flag(word: str, parser: argparse.ArgumentParser) -> str:
    """Return a sentence on a word that is not a flag of a parser, with the flag whose name or help
    is nearest.
    """
    name = word.partition("=")[0]
    if not name.startswith("-"):
        return f"{word!r} belongs to no option: see --help"
    sought = name.strip("-")
    likeness: dict[str, float] = {}
    for action in parser._actions:
        for known in action.option_strings:
            by_name = _alike(sought, known.strip("-"))
            by_help = _alike_in(sought.replace("-", " "), action.help or "")
            found = by_name if by_name >= ALIKE else 0.0
            likeness[known] = max(found, by_help if by_help >= ALIKE_IN_HELP else 0.0)
    best = max(likeness, key=lambda known: likeness[known], default="")
    if not best or not likeness[best]:
        return f"there is no option {name}: see --help"
    return f"there is no option {name}: did you mean {best}?"


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "did you mean ...?" for a name that is not among the `known`; nothing if none is
    near.
    """
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=ALIKE)
    return f"did you mean {found[0]}?" if found else ""


def _alike(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, other, one).ratio()


def _alike_in(words: str, help: str) -> float:
    """Return how alike `words` are to as many neighbouring words of a help text, at best."""
    many, there = words.count(" ") + 1, re.findall(r"[a-z0-9]+", help.lower())
    phrases = (" ".join(there[place : place + many]) for place in range(len(there) - many + 1))
    return (
        max((_alike(words, phrase) for phrase in phrases), default=0.0) if len(words) > 2 else 0.0
    )


def flag(name: str) -> str:
    """Return how an option is written on the command line: `save_every` is `--save-every`."""
    return f"--{name.replace('_', '-')}"


def flag_of(kind: type[Number], limit: Limit | None = None) -> Callable[[str], Number]:
    """Return the function by which `argparse` reads a flag's number."""

    def convert(word: str) -> Number:
        try:
            return read_number(word, kind, limit)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{shown(word)} {error}") from None

    return convert
