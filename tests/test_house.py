"""The promises that the whole package keeps: floors, lengths, light imports, no globals."""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import minidist

PACKAGE = Path(minidist.__file__).parent
FLOORS = {
    "trace": 0,
    "comm": 1,
    "collectives": 2,
    "mesh.py": 3,
    "model": 3,
    "parallel": 4,
    "trainer": 5,
    "cli": 6,
    "__main__.py": 6,
    "__init__.py": 6,
}
LINES = {"floors 0 to 4": 4300, "the package": 6600}  # of code; the count is printed


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def floor_of(parts: tuple[str, ...]) -> int:
    return FLOORS[parts[0]]


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield every module that is imported, inside functions and for type checkers too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor_of_module(name: str) -> int | None:
    parts = name.split(".")
    if parts[0] != "minidist" or len(parts) < 2:
        return None
    return FLOORS.get(parts[1], FLOORS.get(f"{parts[1]}.py"))


def test_no_import_goes_up_a_floor() -> None:
    found = []
    for path in files():
        parts = path.relative_to(PACKAGE).parts
        for name in imports(ast.parse(path.read_text())):
            above = floor_of_module(name)
            if above is not None and above > floor_of(parts):
                found.append(f"{'/'.join(parts)} (floor {floor_of(parts)}) imports {name} (floor {above})")
    assert not found, "\n".join(found)


def test_every_folder_has_a_floor() -> None:
    assert {path.relative_to(PACKAGE).parts[0] for path in files()} <= set(FLOORS)


def test_no_file_is_longer_than_300_lines() -> None:
    long = [f"{path.name}: {n}" for path in files() if (n := len(path.read_text().splitlines())) > 300]
    assert not long, long


def test_no_function_is_longer_than_50_lines() -> None:
    long = []
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > 50:
                long.append(f"{path.name}: {node.name}")
    assert not long, long


def test_public_names_have_docstrings() -> None:
    bare = []
    for path in files():
        for node in ast.parse(path.read_text()).body:
            named = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if named and not ast.get_docstring(node):  # type: ignore[arg-type]
                bare.append(f"{path.name}: {node.name}")  # type: ignore[attr-defined]
    assert not bare, bare


def test_importing_the_lower_floors_imports_neither_torch_nor_mpi() -> None:
    names = "minidist, minidist.comm, minidist.collectives, minidist.trace, minidist.mesh"
    code = f"import sys, {names}; print([m for m in ('torch', 'mpi4py') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_function_writes_a_module_global() -> None:
    found = [
        f"{path.name}:{node.lineno}"
        for path in files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
    ]
    assert not found, found


def test_only_communication_and_launching_look_at_the_environment() -> None:
    """What a run does stands in its arguments: only who starts and joins ranks may look at the environment."""
    allowed = {"comm", "cli"}
    found = [
        str(path.relative_to(PACKAGE))
        for path in files()
        if "os.environ" in path.read_text() and path.relative_to(PACKAGE).parts[0] not in allowed
    ]
    assert not found, found


def lines_of_code(source: str) -> int:
    """Count the lines that hold code: no blank lines, comments or docstrings."""
    prose: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            first = node.body[0]
            prose |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in ignored:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - prose)


def test_the_package_stays_compact(capsys: object) -> None:
    count = dict.fromkeys(FLOORS, 0)
    for path in files():
        count[path.relative_to(PACKAGE).parts[0]] += lines_of_code(path.read_text())
    low = sum(lines for part, lines in count.items() if FLOORS[part] <= 4)
    with capsys.disabled():  # type: ignore[attr-defined]
        print("\nlines of code: " + ", ".join(f"{part} {lines}" for part, lines in count.items()))
        print(f"floors 0 to 4: {low}, the package: {sum(count.values())}")
    assert low < LINES["floors 0 to 4"]
    assert sum(count.values()) < LINES["the package"]
