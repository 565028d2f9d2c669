"""The promises of the design that a parser can check: floors, sizes, no globals, no torch where
none is needed.

A file imports from its own floor or below. Imports inside functions count, and so do those that
only name a type: a reader who starts at the bottom never meets a name from above.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "minidist"
FILES = sorted(PACKAGE.rglob("*.py"))
BOOK = sorted({*PACKAGE.glob("*.py")} - {PACKAGE / "__init__.py", PACKAGE / "__main__.py"})
PAGES = {file.stem for file in BOOK}
# Tokens, lines of all pages and of one; files and lines that a page imports in the end, itself too.
MOST_OF_THE_BOOK = {"tokens": 24_000, "lines": 3_600, "page": 300}
CLOSURES = {"ddp": (5, 1_000), "ring": (3, 450), "train": (24, 3_700)}
INSTRUMENTS = {"bench", "course"}  # they measure and teach the package; they are not the package
# Tokens of code, a string counts once: floors 0 to 4, and the package without its instruments.
# Packing saves none.
MOST_TOKENS = {"core": 180_000, "package": 310_000}
DENSEST = 10.5  # tokens on a line, of a whole file: the formatter alone gives about 9.4
# A page of so few lines of code hides nothing; the ring, the style's example, has 24 of 13 tokens.
SHORT = 25
STRATEGIES = (
    *(
        "adapters",
        "context",
        "ddp",
        "expert",
        "fsdp",
        "gradients",
        "layers",
        "memory",
        "optimizer",
        "pipeline",
    ),
    *("precision", "recompute", "slow_wires", "tensor", "zero"),
)
JOINED = (  # the files that strategies share, and those that join them
    *("__init__", "adjoint", "apply", "clip", "data_axis", "exports", "meta"),
    *("placement", "recipe", "replica", "strategy"),
)
FLOORS = {
    "book": -1,
    "full/options": 0,
    "full/trace": 0,
    "full/comm": 1,
    "full/collectives": 2,
    "full/mesh": 3,
    "full/model": 3,
    "torch_backend": 3,
    **{f"full/{name}": 4 for name in (*STRATEGIES, *JOINED)},
    "full/checkpoint": 5,
    "full/data": 5,
    "full/launch": 5,
    "full/trainer": 5,
    "further": 5,
    "plan": 5,
    "draw": 5,
    "course": 6,
    "bench": 6,
    "cli": 6,
    "__main__": 6,
    "__init__": 6,  # the front door: what users name, from all floors
}
# Words of `further/` that anybody may use: names of files, and plain English.
COMMON = {"__init__", "plain", "options", "strategy", "pipeline", "plans", "server"}
COMMON |= {"Nodes", "Part", "Matrices", "compress", "int8"}
MUTATORS = {
    "append",
    "extend",
    "insert",
    "add",
    "update",
    "setdefault",
    "pop",
    "clear",
    "remove",
    "discard",
    "popitem",
}


def place(file: Path) -> str:
    """Return the name of the folder or module that stands in the table of floors."""
    return placed(file.relative_to(PACKAGE).with_suffix("").parts)


def placed(parts: tuple[str, ...]) -> str:
    """Return the place of a path: in `full/`, each folder and each file is one."""
    if len(parts) == 1 and parts[0] in PAGES:
        return "book"
    inside = parts[0] == "full"
    return "/".join(parts[:2]) if inside and len(parts) > 1 else parts[0]


def name_of(file: Path) -> str:
    return str(file.relative_to(PACKAGE))


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imported(file: Path) -> Iterator[tuple[str, int]]:
    """Yield what a file imports from the package, as places, with the line."""
    for node in ast.walk(parse(file)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}:{node.lineno}: write imports in full"
            here = node.module in ("minidist", "minidist.full")
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = whole if here else [node.module or ""]
        for name in names:
            first, *rest = name.split(".")
            if first == "minidist":
                page = rest[:1] if rest and rest[0] in PAGES else rest
                target = placed(tuple(page)) if page else "__init__"
                front = "full/__init__" if rest[:1] == ["full"] else "__init__"
                yield (target if target in FLOORS else front), node.lineno


@cache
def code(file: Path) -> list[tokenize.TokenInfo]:
    """Return the tokens of a file's code: no comment, no docstring, no end of a line.

    Nor a comma behind the last of several lines: it is there for the formatter, and a call that is
    opened up would else weigh more than the same call on one line.
    """
    nothing = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    words: set[int] = set()  # the lines of docstrings
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            text = node.body[0]
            words |= set(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    with open(file, "rb") as source:
        tokens = list(tokenize.tokenize(source.readline))
    skipped = (*nothing, tokenize.ENCODING)
    found = [token for token in tokens if token.type not in skipped and token.start[0] not in words]
    return (
        [
            token
            for token, after in pairwise([*found, found[-1]])
            if not (
                token.string == "," and after.string in ")]}" and token.start[0] < after.start[0]
            )
        ]
        if found
        else []
    )


@cache
def code_lines(file: Path) -> set[int]:
    """Return the numbers of the lines that hold code."""
    return {line for token in code(file) for line in range(token.start[0], token.end[0] + 1)}


def test_every_file_stands_on_a_floor() -> None:
    assert FILES
    unknown = {place(file) for file in FILES} - FLOORS.keys()
    assert not unknown, f"say in DESIGN and here on which floor these live: {unknown}"


def test_no_import_goes_up_a_floor() -> None:
    wrong = []
    for file in FILES:
        floor = FLOORS[place(file)]
        for target, line in imported(file):
            strangers = FLOORS[target] == floor in (3, 6) and target != place(file)
            if FLOORS[target] > floor or (
                strangers and not {"__init__", "__main__"} & {target, place(file)}
            ):
                wrong.append(
                    f"{name_of(file)}:{line} (floor {floor}) imports {target} (floor "
                    f"{FLOORS[target]})"
                )
    assert wrong == [], (
        "imports go down, and neighbours on floors 3 and 6 know nothing of each other"
    )


def names_of_further() -> set[str]:
    """Return what is in `further/`, in words: its folders, files, and public classes."""
    names = set()
    for file in (PACKAGE / "further").rglob("*.py"):
        parts = file.relative_to(PACKAGE / "further").with_suffix("").parts
        names |= set(parts)
        if len(parts) > 1:
            names |= {node.name for node in parse(file).body if isinstance(node, ast.ClassDef)}
    return names - COMMON


def test_the_house_names_nothing_that_stands_beyond_it() -> None:
    """So whatever is in `further/` is plugged in: as a strategy, an option or an argument."""
    names = names_of_further()
    assert {"zero_plus_plus", "ZeROPlusPlus", "stale", "StalePipeline"} <= names
    named = re.compile(rf"\b({'|'.join(sorted(names))})\b|minidist.further|further/")
    wrong = [
        f"{name_of(file)}: {found[0]}"
        for file in FILES
        if place(file).startswith("full/")
        for found in named.finditer(file.read_text(encoding="utf-8"))
    ]
    assert wrong == [], "no file of `full/` names what is in `further/`"


def test_a_file_fits_in_a_sitting_and_a_function_on_a_screen() -> None:
    wrong = []
    for file in FILES:
        if (length := len(file.read_text(encoding="utf-8").splitlines())) > 400:
            wrong.append(f"{name_of(file)} has {length} lines")
        code = code_lines(file)
        for node in ast.walk(parse(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = len(code & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))
                if body > 60:
                    wrong.append(f"{name_of(file)}: {node.name} has {body} lines of code")
    assert wrong == [], (
        "a file is one idea and has at most 400 lines, a function at most 60 of code"
    )


def test_a_folder_is_one_subject() -> None:
    house = [file for file in FILES if file.parent != PACKAGE and file.stem != "__init__"]
    folders = Counter(name_of(file.parent) for file in house)
    assert {folder: files for folder, files in folders.items() if files > 12} == {}, (
        "at most a dozen files"
    )


def test_a_folders_page_names_its_files() -> None:
    wrong = [
        name_of(file)
        for file in FILES
        if file.stem not in ("__init__", "__main__")
        and file.parent not in (PACKAGE, PACKAGE / "bench/subjects")
        if file.stem not in (ast.get_docstring(parse(file.parent / "__init__.py")) or "")
    ]
    assert wrong == [], "a folder's `__init__.py` says what is in it, and in which order to read"


def test_a_folders_page_names_no_file_that_is_gone() -> None:
    gone = []
    users = {"x.py", "program.py"}  # what somebody starts, in an example
    for page in FILES:
        if page.name != "__init__.py" or page.parent == PACKAGE:
            continue
        if place(page) == "course":  # it names the files of lessons
            continue
        floor = page.parent if place(page) == "full/__init__" else PACKAGE / place(page)
        there = {file.name for file in floor.rglob("*.py")} | users
        for named in re.findall(r"[\w/]+\.py\b", ast.get_docstring(parse(page)) or ""):
            elsewhere = (PACKAGE / named, PACKAGE.parent / named)
            if Path(named).name not in there and not any(path.exists() for path in elsewhere):
                gone.append(f"{name_of(page)}: {named}")
    assert gone == [], "a folder's `__init__.py` names files that are not in it"


def test_a_folder_named_after_a_page_names_that_page_first() -> None:
    folders = [PACKAGE / "full" / page for page in PAGES]
    for folder in filter(Path.is_dir, folders):
        lines = (ast.get_docstring(parse(folder / "__init__.py")) or "").splitlines()
        prose = "\n".join(line for line in lines if not line.startswith("    "))
        order = re.findall(r"`([\w/]+\.py)`", prose)
        assert order[:1] == [f"minidist/{folder.name}.py"], name_of(folder)


def test_the_book_stays_small() -> None:
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in BOOK}
    assert {file.name for file in BOOK if lines[file] > MOST_OF_THE_BOOK["page"]} == set()
    assert sum(lines.values()) <= MOST_OF_THE_BOOK["lines"]
    assert sum(len(code(file)) for file in BOOK) <= MOST_OF_THE_BOOK["tokens"]
    for page, (files, most) in CLOSURES.items():
        closed = closure(PACKAGE / f"{page}.py")
        assert len(closed) <= files and sum(lines[file] for file in closed) <= most, closed


def closure(file: Path) -> set[Path]:
    """Return a page with all pages that it imports in the end."""
    found, left = set[Path](), [file]
    while left:
        page = left.pop()
        if page not in found:
            found.add(page)
            left += [target for target in files_imported(page) if target in BOOK]
    return found


def test_the_package_stays_compact(capsys: pytest.CaptureFixture[str]) -> None:
    weight = {file: len(code(file)) for file in FILES}
    core = sum(tokens for file, tokens in weight.items() if FLOORS[place(file)] < 5)
    package = sum(tokens for file, tokens in weight.items() if place(file) not in INSTRUMENTS)
    with capsys.disabled():
        print(f"\ntokens of code: floors 0 to 4 {core:,}, the package {package:,}", end=" ")
    assert core <= MOST_TOKENS["core"], "floors 0 to 4 have outgrown their promise"
    assert package <= MOST_TOKENS["package"], "the package has outgrown its promise"


def test_no_file_is_packed() -> None:
    density = {file: len(code(file)) / max(1, len(code_lines(file))) for file in FILES}
    packed = [
        f"{name_of(file)} has {tokens:.1f} tokens a line"
        for file, tokens in density.items()
        if tokens > DENSEST and len(code_lines(file)) > SHORT
    ]
    assert packed == [], "name values, and write one argument a line, where a call is dense"


def test_nothing_imports_in_a_cycle() -> None:
    """Neither do files, nor folders of one floor; imports that only name a type and imports inside
    functions count.
    """
    files = {file: set(files_imported(file)) - {file} for file in FILES}
    assert cycles(files) == []
    folders: dict[Path, set[Path]] = {}
    for file, targets in files.items():
        if file.parent != PACKAGE:
            folders.setdefault(file.parent, set()).update(
                target.parent
                for target in targets
                if target.parent != PACKAGE and not inside(file, target)
            )
    assert cycles(folders) == []


def inside(file: Path, target: Path) -> bool:
    """Tell whether one lies in a folder of the other's: a front door names what is behind it."""
    return file.parent in target.parents or target.parent in file.parents


def files_imported(file: Path) -> Iterator[Path]:
    """Yield the files of the package that a file imports: a module, or what a front door takes its
    names from.
    """
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            path = PACKAGE.parent.joinpath(*name.split("."))
            yield from (
                found
                for found in (path.with_suffix(".py"), path.parent.with_suffix(".py"))
                if found in set(FILES)
            )


def cycles(edges: dict[Path, set[Path]]) -> list[str]:
    """Return what cannot be put in an order: leave out what imports nothing that is left, as often
    as possible.
    """
    left = dict(edges)
    while done := [one for one, targets in left.items() if not targets & left.keys() - {one}]:
        left = {one: targets for one, targets in left.items() if one not in done}
    while done := [
        one
        for one in left
        if not any(one in targets for other, targets in left.items() if other != one)
    ]:
        left = {one: targets for one, targets in left.items() if one not in done}
    return sorted(name_of(one) for one in left)


def test_inheritance_is_at_most_two_steps_deep() -> None:
    """What a class is stands in three files at most. Protocols, and classes of others such as
    `nn.Module`, do not count.
    """
    classes = {
        (file, node.name): node
        for file in FILES
        for node in ast.walk(parse(file))
        if isinstance(node, ast.ClassDef)
    }

    def steps(file: Path, node: ast.ClassDef) -> int:
        names = [base.id for base in node.bases if isinstance(base, ast.Name)]
        if "Protocol" in names:
            return -1
        sources = {name: (file, name) for name in names if name != node.name}
        for line in ast.walk(parse(file)):
            if isinstance(line, ast.ImportFrom) and (line.module or "").startswith("minidist"):
                source = PACKAGE.parent.joinpath(*(line.module or "").split("."))
                for alias in line.names:
                    sources[alias.asname or alias.name] = (source.with_suffix(".py"), alias.name)
        found = [sources[name] for name in names if sources.get(name) in classes]
        return max((1 + steps(origin, classes[origin, name]) for origin, name in found), default=0)

    deep = [
        f"{name_of(file)}: {name}"
        for (file, name), node in classes.items()
        if steps(file, node) > 2
    ]
    assert deep == [], "give a class what it needs, in place of a third step of inheritance"


def test_no_module_keeps_state() -> None:
    assert [found for file in FILES for found in state_of(file)] == [], (
        "pass what is needed as an argument"
    )


def state_of(file: Path) -> Iterator[str]:
    """Yield where a file changes what is its module's."""
    tree = parse(file)
    kept: set[str] = set()
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else targets
        kept |= {target.id for target in targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        where = f"{name_of(file)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Global):
            yield f"{where}: global {', '.join(node.names)}"
        if (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store | ast.Del)
            and _names(node.value, kept)
        ):
            yield f"{where} changes a global of the module"
        called = node.func if isinstance(node, ast.Call) else None
        if (
            isinstance(called, ast.Attribute)
            and called.attr in MUTATORS
            and _names(called.value, kept)
        ):
            yield f"{where} changes a global of the module"


def _names(node: ast.expr, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def test_only_the_floor_of_ranks_and_the_commands_read_the_environment() -> None:
    """`comm` learns there who started it, the commands hand it on to what they start."""
    wrong = [
        f"{name_of(file)}:{node.lineno}"
        for file in FILES
        if place(file) not in ("book", "full/comm", "full/launch", "cli", "course", "bench")
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        if node.attr in ("environ", "environb", "getenv", "putenv")
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "module",
    (
        "minidist",
        "minidist.full.trace",
        "minidist.full.comm",
        "minidist.full.collectives",
        "minidist.full.comm.threads_wire.threads_wire",
        "minidist.full.mesh",
        "minidist.full.model.config",
        "minidist.full.model",
        "minidist.full",
        "minidist.full.pipeline",
        "minidist.plan.search",
        "minidist.plan.cost",
        "minidist.plan.published.check",
        "minidist.draw.pipeline",
        "minidist.cli.plan.command",
    ),
)
def test_what_needs_no_torch_imports_neither_torch_nor_mpi(module: str) -> None:
    program = f"""
import sys
import {module}
import minidist
if "collectives" in "{module}":
    import numpy
    minidist.run(lambda comm: minidist.full.collectives.all_reduce(numpy.ones(4), comm), 2)
print(*sorted({{"torch", "mpi4py", "safetensors", "matplotlib"}} & sys.modules.keys()))
"""
    outcome = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert outcome.stdout.strip() == ""


@pytest.mark.parametrize(
    "package", ("minidist.full.model", "minidist.full", "minidist.full.context")
)
def test_no_file_takes_the_place_of_a_name_that_is_exported(package: str) -> None:
    """Importing a file makes it an attribute of its package: it would hide a name like its own."""
    module, exports = (importlib.import_module(name) for name in (package, f"{package}.exports"))
    files = {file.stem for file in PACKAGE.parent.joinpath(*package.split(".")).iterdir()}
    for name in exports.__all__:
        named = getattr(exports, name)
        assert name not in files or named.__name__ == f"{package}.{name}"
        assert getattr(module, name) is named
