"""Told twice: a fast page begins with a table that says where the lines of the plain page are in
it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import minidist

FULL = Path(minidist.__file__).parent / "full"
FAST = (
    "ddp/data_parallel.py",
    "zero/zero.py",
    "fsdp/fsdp.py",
    "tensor/tensor_parallel.py",
    "pipeline/executor.py",
    "context/ring.py",
    "slow_wires/outer.py",
)


def table(page: Path) -> list[tuple[str, str]]:
    """Return the rows of a page's table: words of the plain page, and where they are here."""
    found = re.search(
        r"^    .*plain\.py  .*here\n(?:    .+\n)+", ast.get_docstring(tree(page)) or "", re.M
    )
    assert found, "it has such a table"
    heading, *rows = found[0].splitlines()
    there, here = heading.index("plain.py"), heading.index("here")
    return [(row[there:here].strip(), row[here:]) for row in rows]


def tree(page: Path) -> ast.Module:
    return ast.parse(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("fast", FAST)
def test_the_table_of_a_fast_page_names_lines_of_both_pages(fast: str) -> None:
    page = FULL / fast
    plain = ((FULL / "fsdp" if page.parent.name == "zero" else page.parent) / "plain.py").read_text(
        encoding="utf-8"
    )
    found = [node for file in FULL.rglob("*.py") for node in ast.walk(tree(file))]
    defined = {node.name for node in found if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    rows = table(page)
    assert len(rows) >= 4
    for words, where in rows:
        assert words == "-" or any(word in plain for word in re.findall(r"\w{4,}", words)), words
        for name in re.findall(r"`([\w.]+)[`(]", where):
            assert name.endswith(".py") or set(name.split(".")) <= defined, name
