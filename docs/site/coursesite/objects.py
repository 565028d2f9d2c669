"""What a file of the package defines for its users: functions and classes, with signature and line.

The file is parsed, not imported: the reference needs neither torch nor MPI, and says what is
written.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Defined:
    """A function, a class or a method: where it begins, and what it says of itself."""

    kind: str
    name: str
    signature: str
    docstring: str
    line: int
    members: tuple[Defined, ...] = field(default=())


def docstring_of(tree: ast.Module | ast.ClassDef | Function) -> str:
    """Return a docstring without its indentation, or nothing."""
    return ast.get_docstring(tree) or ""


def parsed(file: Path) -> ast.Module:
    """Return the tree of a file."""
    return ast.parse(file.read_text(encoding="utf-8"))


def defined_in(tree: ast.Module) -> Iterator[Defined]:
    """Yield what a file defines under a name without an underscore and describes, in its order."""
    seen = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_") or not docstring_of(node) or node.name in seen:
                continue
            seen.add(node.name)
            yield class_of(node) if isinstance(node, ast.ClassDef) else function_of(node)


def offered_by(init: ast.Module, folder: str) -> dict[str, int]:
    """Return how many names a folder's `__init__` takes from each of its files, to offer them."""
    package, found = folder.replace("/", "."), dict[str, int]()
    for node in ast.walk(init):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            file = str(node.module).removeprefix(f"{package}.")
            found[file] = found.get(file, 0) + len(node.names)
    return found


def function_of(node: Function, kind: str = "function") -> Defined:
    """Return a function or a method."""
    returns = f" → {ast.unparse(node.returns)}" if node.returns else ""
    signature = f"({ast.unparse(without_self(node))}){returns}"
    if any(ast.unparse(each) in ("property", "cached_property") for each in node.decorator_list):
        kind, signature = "property", returns.replace(" →", ":")
    return Defined(kind, node.name, signature, docstring_of(node), node.lineno)


def without_self(node: Function) -> ast.arguments:
    """Return the arguments as a caller sees them."""
    given = node.args
    first = given.args[:1]
    if first and first[0].arg in ("self", "cls"):
        return ast.arguments(
            given.posonlyargs,
            given.args[1:],
            given.vararg,
            given.kwonlyargs,
            given.kw_defaults,
            given.kwarg,
            given.defaults,
        )
    return given


def class_of(node: ast.ClassDef) -> Defined:
    """Return a class with those of its methods that describe themselves.

    The signature of a class is that of its `__init__`; a dataclass lists its fields under
    Attributes.
    """
    methods = []
    signature, seen = "", set()
    for each in node.body:
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if each.name == "__init__":
            signature = f"({ast.unparse(without_self(each))})"
        elif not each.name.startswith("_") and docstring_of(each) and each.name not in seen:
            seen.add(each.name)
            methods.append(function_of(each, "method"))
    return Defined("class", node.name, signature, docstring_of(node), node.lineno, tuple(methods))
