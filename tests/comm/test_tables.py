"""A folder behind pages of the book begins with a table that says where their lines are in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import minidist

ROOT = Path(minidist.__file__).parent
PAGES = {
    "comm": ("comm", "threads", "cluster", "processes"),
    "collectives": ("ring", "collectives"),
}


def defined() -> set[str]:
    """Return the functions and classes of these folders, and the names of their files."""
    names = {"TABLE"}
    for folder in PAGES:
        for file in (ROOT / "full" / folder).rglob("*.py"):
            names |= {file.stem, file.parent.name}
            nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            names |= {n.name for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    return names


@pytest.mark.parametrize("folder", PAGES)
def test_the_table_names_what_there_is_on_both_sides(folder: str) -> None:
    pages = "".join((ROOT / f"{page}.py").read_text(encoding="utf-8") for page in PAGES[folder])
    text = (ROOT / "full" / folder / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r"^    the book +here\n((?:    .+\n)+)", text, re.M)
    assert found, "it has such a table"
    here, rows = found[0].index("here"), found[1].splitlines()
    assert len(rows) >= 12
    for row in rows:
        for word in re.findall(r"\w+", row[:here]):
            assert word in (*PAGES[folder], "-") or re.search(rf"\b{word}\b", pages), row
        for name in re.findall(r"`([\w./]+)`", row[here:]):
            assert set(re.findall(r"\w+", name)) <= defined(), name
