"""The command line of the commands that run as one process: a mistake is one sentence, and status 2."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from minidist.comm.job.number import Limit, Number, read_number, shown


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong without printing all options first."""

    def error(self, message: str) -> NoReturn:
        """Leave with status 2."""
        command, words = self.prog.removeprefix("python -m "), message.removeprefix("argument ")
        print(f"{command}: {words}; see --help", file=sys.stderr)
        raise SystemExit(2)


def flag_of(kind: type[Number], limit: Limit | None = None) -> Callable[[str], Number]:
    """Return the function by which `argparse` reads a flag's number."""

    def convert(word: str) -> Number:
        try:
            return read_number(word, kind, limit)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{shown(word)} {error}") from None

    return convert
