"""The page on which the package itself runs: `docs/run_here` makes what stands on it, and its files.

Sphinx's page `run.md` has a mark where that belongs. What the page loads depends on whether a copy
of Pyodide lies beside the site, so it is put there last.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

MARK = "<!-- run here -->"
PAGE = "run.html"


def put_run_page(repository: Path, site: Path, work: Path, pyodide: Path | None) -> None:
    """Fill in the page, and write what it loads.

    Raises
    ------
    ValueError
        If the folder of Pyodide is not what the page needs.
    """
    kept = work / PAGE  # Sphinx writes a page again only if it has changed
    page = (site / PAGE).read_text(encoding="utf-8")
    if MARK in page:
        kept.write_text(page, encoding="utf-8")
    maker = load(repository / "docs/run_here/build.py")
    maker.build(site, pyodide)
    content = maker.fragment(pyodide, maker.archive())
    looks = '<link rel="stylesheet" href="run/run.css">'
    script = '<script src="run/run.js"></script>'
    filled = kept.read_text(encoding="utf-8").replace(MARK, f"{looks}{content}{script}")
    (site / PAGE).write_text(filled, encoding="utf-8")


def load(file: Path) -> ModuleType:
    """Import a file that no package has."""
    spec = importlib.util.spec_from_file_location("run_here_build", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
