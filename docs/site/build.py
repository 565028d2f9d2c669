"""Build the site: `python docs/site/build.py --to site`.

    --zip FILE         the site as one file, to put anywhere
    --pyodide FOLDER   put this copy of Pyodide beside the pages, for a place without a network

Needs no network. A warning ends it with an error.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
sys.path.insert(0, str(HERE))
# Where it is there, `jsonschema` builds its grammar of web addresses on import, which takes two
# seconds. Notebooks have none to be checked.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

from coursesite.lessons import (  # noqa: E402
    lesson_folders,
    offered_files,
    programs_of,
    programs_page,
)
from coursesite.links import linked_files  # noqa: E402
from coursesite.run_here import put_run_page  # noqa: E402
from coursesite.sources import write_source_page  # noqa: E402
from coursesite.stage import stage  # noqa: E402
from sphinx.cmd.build import build_main  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    """Build the site; return the exit status."""
    options = parser().parse_args(argv)
    begun = time.monotonic()
    pages = options.work / "pages"
    stage(REPOSITORY, pages)
    with ProcessPoolExecutor(1) as beside:
        write = partial(write_source_page, REPOSITORY, site=options.to)
        sources = beside.map(write, files_with_pages(pages), chunksize=32)
        strict = ["-W", "--keep-going", "-q", "-j", str(options.jobs)]
        folders = ["-c", str(HERE), "-d", str(options.work / "doctrees"), str(pages)]
        status: int = build_main([*strict, *folders, str(options.to)])
        list(sources)  # raises what one of them has raised
    if status:
        return status
    for file in offered_files(REPOSITORY):
        copy(REPOSITORY / file, options.to / file)
    for name in lesson_folders(REPOSITORY):
        text = programs_of(name, REPOSITORY)
        (options.to / programs_page(name)).write_text(text, encoding="utf-8")
    (options.to / ".nojekyll").touch()  # GitHub Pages would leave out folders that begin with _
    try:
        put_run_page(REPOSITORY, options.to, options.work, options.pyodide)
    except ValueError as error:
        print(f"build: {error}", file=sys.stderr)
        return 2
    if options.zip:
        made = shutil.make_archive(str(options.zip.with_suffix("")), "zip", options.to)
        print(f"{made}: {Path(made).stat().st_size:,} bytes")
    count = sum(1 for _ in options.to.rglob("*.html"))
    print(f"{options.to}: {count} pages, {time.monotonic() - begun:.0f} s")
    return 0


def parser() -> argparse.ArgumentParser:
    """Return what the command line may say."""
    found = argparse.ArgumentParser(description="Build the site.")
    found.add_argument("--to", type=Path, default=REPOSITORY / "site", help="the folder (site)")
    found.add_argument("--work", type=Path, default=REPOSITORY / "build/site", help="for Sphinx")
    found.add_argument("--jobs", type=int, default=2, help="processes that Sphinx may use (2)")
    found.add_argument("--zip", type=Path, metavar="FILE", help="write the site as one file, too")
    found.add_argument("--pyodide", type=folder, metavar="FOLDER", help="a copy of Pyodide")
    return found


def folder(name: str) -> Path:
    """Return a folder that has to be there."""
    path = Path(name)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {name}: unpack Pyodide there first")
    return path


def files_with_pages(pages: Path) -> list[str]:
    """Return the files of the repository whose lines have a page: all of the package, and what
    others link to.
    """
    files = (path.relative_to(REPOSITORY) for path in (REPOSITORY / "minidist").rglob("*.py"))
    found = {path.as_posix() for path in files}
    for page in (*pages.rglob("*.md"), *pages.rglob("*.ipynb")):
        found |= linked_files(page.read_text(encoding="utf-8"))
    return sorted(found)


def copy(source: Path, target: Path) -> None:
    """Copy a file into a folder, which is made if it is not there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


if __name__ == "__main__":
    sys.exit(main())
