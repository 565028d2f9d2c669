"""Which lessons teach a file of the package: those whose list of what to read names it.

## Then read in the package, in this order     a name without a folder is in that of the one before

1. `minidist/full/collectives/pairwise.py` and `hierarchical.py`: ten lines each.
"""

from __future__ import annotations

import posixpath
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

LIST = re.compile(r"^## Then read in the package.*?\n(.*?)(?=^## |\Z)", re.M | re.S)
FILE = re.compile(r"`([\w/]+\.py)`")
TITLE = re.compile(r"\A# (.+)")


class Taught(NamedTuple):
    """A lesson, and where its page is, from the root of the site."""

    title: str
    page: str


@cache
def lessons_by_file(repository: Path) -> dict[str, tuple[Taught, ...]]:
    """Return the lessons that teach each file, in the course's order."""
    found: dict[str, list[Taught]] = {}
    for text in sorted((repository / "lessons").glob("[0-9][0-9]_*/README.md")):
        words = text.read_text(encoding="utf-8")
        title = TITLE.match(words)
        assert title is not None, f"{text} begins with its title"
        taught = Taught(title[1], f"lessons/{text.parent.name}/index.html")
        folder = ""
        for name in FILE.findall("".join(LIST.findall(words))):
            folder = posixpath.dirname(name) or folder
            file = posixpath.join(folder, posixpath.basename(name))
            lessons = found.setdefault(file, [])
            if (repository / file).is_file() and taught not in lessons:
                lessons.append(taught)
    return {file: tuple(lessons) for file, lessons in found.items()}
