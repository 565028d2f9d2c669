"""Build the page that runs the package: `python docs/run_here/build.py --to FOLDER`.

    FOLDER/run.html                     the page; `page/fragment.html` in a shell of its own
    FOLDER/run/  run.js run.css         its script and its looks
                 worker.js              Python, in a worker
                 minidist.zip           the package as it is in this working tree, and lessons 01 to 03
    FOLDER/pyodide/                     with --pyodide: what the page loads, for a place without a network

Without `--pyodide` the page loads Pyodide and numpy from a CDN, and only when a button is pressed.
Serve FOLDER by any static server, such as `python -m http.server`.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import io
import json
import shutil
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PACKAGE = REPOSITORY / "minidist"
VERSION = "0.27.7"  # of Pyodide: Python 3.12, and numpy 2.0.2
CDN = f"https://cdn.jsdelivr.net/pyodide/v{VERSION}/full/"
BYTES = {"compressed": 8_900_000, "plain": 16_900_000}  # of what a page loads from the CDN
RUNTIME = (
    "pyodide.js",
    "pyodide.asm.js",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
)
LESSONS = ("01_ranks", "02_ring_all_reduce", "03_trees_and_meshes")
EXAMPLES = {
    "ring": "a ring all-reduce",
    "by_hand": "the ring's first half, by hand",
    "deadlock": "a deadlock",
    "many": "64 ranks on a modelled cluster",
}
APART = ("bench", "torch_backend")  # folders that a page cannot use: they measure, or need torch
DATA = ("draw/*.html", "draw/*.svg", "plan/*.toml", "plan/trust/*.json")


class BuildError(ValueError):
    """The page cannot be built. The text says why, and what to do."""


def main(argv: list[str] | None = None) -> int:
    """Build the page; return the exit status."""
    parser = argparse.ArgumentParser(description="Build the page that runs the package.")
    parser.add_argument("--to", type=Path, required=True, help="the folder")
    parser.add_argument("--pyodide", type=Path, metavar="FOLDER", help="a copy of Pyodide")
    options = parser.parse_args(argv)
    try:
        build(options.to, options.pyodide)
    except BuildError as error:
        print(f"build: {error}", file=sys.stderr)
        return 2
    size = (options.to / "run/minidist.zip").stat().st_size
    print(f"{options.to / 'run.html'}: the package takes {size:,} bytes")
    return 0


def build(to: Path, pyodide: Path | None = None) -> None:
    """Write the page and what belongs to it into the folder `to`."""
    assets = to / "run"
    assets.mkdir(parents=True, exist_ok=True)
    package = archive()
    (assets / "minidist.zip").write_bytes(package)
    for name in ("run.js", "run.css", "worker.js"):
        shutil.copyfile(HERE / "page" / name, assets / name)
    if pyodide is not None:
        (to / "pyodide").mkdir(exist_ok=True)
        for file in runtime_files(pyodide):
            shutil.copyfile(file, to / "pyodide" / file.name)
    shell = Template((HERE / "page/shell.html").read_text(encoding="utf-8"))
    page = shell.substitute(fragment=fragment(pyodide, package))
    (to / "run.html").write_text(page, encoding="utf-8")


# ---------------------------------------------------------------- what the page loads


def archive() -> bytes:
    """Return the package, as it is in the working tree, with lessons, as a zip: the same bytes of
    the same files.
    """
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as found:
        for name, path in sorted(archived()):
            found.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), path.read_bytes(), 8)
    return made.getvalue()


def archived() -> Iterator[tuple[str, Path]]:
    """Yield the files of the archive, by the names that they have in it."""
    yield "in_page.py", HERE / "in_page.py"
    for pattern in ("**/*.py", *DATA):
        for path in PACKAGE.glob(pattern):
            if path.relative_to(PACKAGE).parts[0] not in APART:
                yield path.relative_to(REPOSITORY).as_posix(), path
    for lesson in LESSONS:
        for pattern in ("exercise.py", "checks.py", "judges*.py"):
            for path in (REPOSITORY / "lessons" / lesson).glob(pattern):
                yield path.relative_to(REPOSITORY).as_posix(), path


def runtime_files(folder: Path) -> list[Path]:
    """Return the files of a copy of Pyodide that a page loads.

    Raises
    ------
    BuildError
        If one is missing, is not what the copy itself says, or belongs to another version.
    """
    fix = f"unpack npm's pyodide@{VERSION} there, and the release's numpy wheel beside it"
    files = [folder / name for name in RUNTIME]
    if absent := [file.name for file in files if not file.is_file()]:
        raise BuildError(f"{folder} holds no {', '.join(absent)}: {fix}")
    lock = json.loads((folder / "pyodide-lock.json").read_text(encoding="utf-8"))
    if (version := lock["info"]["version"]) != VERSION:
        raise BuildError(f"{folder} holds Pyodide {version}, and the page is for {VERSION}: {fix}")
    numpy = lock["packages"]["numpy"]
    wheel = folder / numpy["file_name"]
    if not wheel.is_file():
        raise BuildError(f"{folder} holds no {wheel.name}: {fix}")
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != numpy["sha256"]:
        raise BuildError(f"{wheel} is not the file that pyodide-lock.json names: {fix}")
    return [*files, wheel]


def sizes(files: list[Path]) -> dict[str, int]:
    """Return how many bytes files have, and have when a server compresses them."""
    return {
        "compressed": sum(len(gzip.compress(file.read_bytes(), 6)) for file in files),
        "plain": sum(file.stat().st_size for file in files),
    }


# ---------------------------------------------------------------- the page


def fragment(pyodide: Path | None, package: bytes) -> str:
    """Return the page without its shell, to stand in another one, which loads `run/run.css` and
    `run/run.js`; `package` is the archive.
    """
    found = BYTES if pyodide is None else sizes(runtime_files(pyodide))
    names = ("v100", "a100", "h100", "h200", "b200", "tpu-v5p")
    files = {"example": examples(), "lesson": exercises()}
    where = "from the jsDelivr CDN" if pyodide is None else "from this site"
    megabytes = {how: f"{bytes / 1e6:.0f} MB" for how, bytes in found.items()}
    text = Template((HERE / "page/fragment.html").read_text(encoding="utf-8"))
    return text.substitute(
        runtime=CDN if pyodide is None else "pyodide/",
        loads=(
            f"A button loads Python ({where}: Pyodide {VERSION} and numpy, {megabytes['plain']}, "
            f"{megabytes['compressed']} where the server compresses) and this package "
            f"({len(package) / 1e6:.1f} MB), once."
        ),
        files=json.dumps(files).replace("<", "\\u003c"),
        examples=options(EXAMPLES, "ring"),
        lessons=options({name[:2]: title(name) for name in LESSONS}, "01"),
        schedules=options({name: name for name in schedule_names()}, "1f1b"),
        models=options({name: name for name in table("models")}, "llama-70b"),
        clusters=options({name: name for name in table("clusters") if name in names}, "h100"),
        first=html.escape(files["example"]["ring"]),
        schedule=html.escape(SCHEDULE),
    )


def options(texts: Mapping[str, str], chosen: str) -> str:
    """Return the options of a list to choose from."""
    return "".join(
        f'<option value="{html.escape(value)}"{" selected" * (value == chosen)}>'
        f"{html.escape(text)}</option>"
        for value, text in texts.items()
    )


def examples() -> dict[str, str]:
    """Return the programs to begin with."""
    return {name: (HERE / f"programs/{name}.py").read_text(encoding="utf-8") for name in EXAMPLES}


def exercises() -> dict[str, str]:
    """Return the exercises, by the numbers of their lessons."""
    return {
        name[:2]: (REPOSITORY / "lessons" / name / "exercise.py").read_text(encoding="utf-8")
        for name in LESSONS
    }


def title(lesson: str) -> str:
    """Return `01 ranks`."""
    return lesson.replace("_", " ")


def table(name: str) -> dict[str, Any]:
    """Return a table of the planner's."""
    return tomllib.loads((PACKAGE / f"plan/{name}.toml").read_text(encoding="utf-8"))


def schedule_names() -> list[str]:
    """Return the schedules that have a name."""
    sys.path.insert(0, str(REPOSITORY))
    from minidist.full.pipeline import NAMES

    return list(NAMES)


SCHEDULE = """\
# 1F1B: two stages, four microbatches
0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
"""


if __name__ == "__main__":
    sys.exit(main())
