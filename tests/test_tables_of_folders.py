"""Told twice: a folder that has a page in the book begins with a table of where its lines are."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import minidist

PACKAGE = Path(minidist.__file__).parent
FOLDERS = {
    page.stem: PACKAGE / "full" / page.stem
    for page in PACKAGE.glob("*.py")
    if (PACKAGE / "full" / page.stem).is_dir()
    and page.stem not in ("comm", "collectives")  # These have several: tests/comm/test_tables.py.
}
FOLDERS |= {"moe": PACKAGE / "full/model/moe", "budget": PACKAGE / "plan"}


def tree(page: Path) -> ast.Module:
    return ast.parse(page.read_text(encoding="utf-8"))


@cache
def defined() -> set[str]:
    """Return the names of all modules, classes and functions of the package."""
    files = [*PACKAGE.rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(tree(file))]
    kinds = ast.ClassDef | ast.FunctionDef
    return {node.name for node in nodes if isinstance(node, kinds)} | {file.stem for file in files}


def docstring(folder: Path) -> str:
    return ast.get_docstring(tree(folder / "__init__.py")) or ""


def table(folder: Path) -> list[tuple[str, str]]:
    """Return the rows of a folder's table: words of the page, and where they are here."""
    found = re.search(r"\A.+\n(?:.+\n)?\n    the book  +here\n(?:    .+\n)+", docstring(folder))
    assert found, f"{folder.name} begins with such a table"
    *_, heading, rows = re.split(r"(    the book  +here)\n", found[0])
    here = heading.index("here")
    return [(row[:here].strip(), row[here:]) for row in rows.splitlines()]


@pytest.mark.parametrize("page", FOLDERS)
def test_the_table_of_a_folder_names_lines_of_its_page_and_what_is_here(page: str) -> None:
    text, rows = (PACKAGE / f"{page}.py").read_text(encoding="utf-8"), table(FOLDERS[page])
    assert len(rows) >= 4
    for words, where in rows:
        assert words == "-" or any(word in text for word in re.findall(r"\w{3,}", words)), words
        for name in re.findall(r"`([\w.]+)[`(]", where):
            assert (FOLDERS[page] / name).exists() or set(name.split(".")) <= defined(), name
