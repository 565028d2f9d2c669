"""The command line of the commands that run as one process: a mistake is one sentence, and status 2."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong without printing all options first."""

    def error(self, message: str) -> NoReturn:
        """Leave with status 2."""
        print(
            f"{self.prog.removeprefix('python -m ')}: {message.removeprefix('argument ')}; see --help", file=sys.stderr
        )
        raise SystemExit(2)
