"""What Sphinx is told: parsers, directives, and what happens to each page."""

from __future__ import annotations

import zlib
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

from coursesite.described import add_alt_texts, describe, fold_key_frames
from coursesite.fragments import REPOSITORY, Interactive, Map, Player
from coursesite.lessons import lesson_folders, programs_page
from coursesite.links import ROOT
from coursesite.named import link_named_files
from coursesite.navigation import Navigation
from coursesite.printed import link_printed_numbers
from coursesite.reference import FolderParser
from coursesite.search import SearchWithNumbers
from coursesite.stops import COURSE, stops


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register everything."""
    app.add_source_suffix(".folder", "folder")
    app.add_source_parser(FolderParser)
    app.add_directive("player", Player)
    app.add_directive("interactive", Interactive)
    app.add_directive("map", Map)
    app.add_search_language(SearchWithNumbers)
    app.connect("builder-inited", keep_files_of_notebooks_aside, priority=900)  # after myst-nb
    app.connect("doctree-read", read)
    app.connect("doctree-read", name_notebook, priority=900)  # after Sphinx has noted its title
    app.connect("doctree-resolved", resolve_root)
    app.connect("html-page-context", describe)
    app.connect("html-page-context", Navigation().offer, priority=400)  # before the theme asks
    return {"parallel_read_safe": True, "parallel_write_safe": True, "env_version": version()}


def keep_files_of_notebooks_aside(app: Sphinx) -> None:
    """Have myst-nb write the files of notebooks, such as images, into the folder of the build: it
    would write them beside the site, which is the repository.
    """
    folder = Path(app.doctreedir).parent / "jupyter_execute"
    config = app.env.mystnb_config  # type: ignore[attr-defined]
    app.env.mystnb_config = config.copy(output_folder=str(folder))  # type: ignore[attr-defined]


def version() -> int:
    """Return a number that changes with this code, so that Sphinx then reads all pages again."""
    site = Path(__file__).parents[1]
    files = sorted([*site.glob("*/*.py"), *site.glob("*.py"), *site.glob("figures/*.html")])
    return zlib.crc32(b"".join(file.read_bytes() for file in files))


def read(app: Sphinx, doctree: nodes.document) -> None:
    """Finish a page that has been read."""
    page = app.env.docname
    folder = page.removeprefix("notebooks/").removeprefix("lessons/").removesuffix("/index")
    lesson = folder if folder in lesson_folders(REPOSITORY) else ""
    if page.startswith("notebooks/"):
        add_alt_texts(doctree, REPOSITORY / f"{page}.ipynb")
        fold_key_frames(doctree)
        add_bar(doctree, f"{ROOT}{page}.ipynb", f"{ROOT}lessons/{lesson}/index.html")
    elif page.startswith(("lessons/", "docs/", "readme")):
        link_printed_numbers(doctree, f"{ROOT}{programs_page(lesson)}" if lesson else "")
    if lesson:
        app.env.note_dependency(str(REPOSITORY / COURSE))
        if lines := stops(lesson, REPOSITORY):
            doctree[0] += lines
    of_package = Path(app.env.doc2path(page)).suffix == ".folder"
    folder = page.removeprefix("reference/").replace(".", "/") if of_package else ""
    link_named_files(doctree, REPOSITORY, f"minidist/{folder}".removesuffix("/minidist"))


def name_notebook(app: Sphinx, doctree: nodes.document) -> None:
    """Say of a notebook that it is one where its title stands alone: in the search, in the head, and
    where a page before or after leads to it. A lesson has the same title.
    """
    page = app.env.docname
    if page.startswith("notebooks/"):
        title = nodes.title("", f"{app.env.titles[page].astext()} (notebook)")
        app.env.titles[page] = app.env.longtitles[page] = title


def add_bar(doctree: nodes.document, notebook: str, lesson: str) -> None:
    """Put a line below a notebook's title: back to its lesson, and the file to download."""
    title = next(doctree.findall(nodes.title))
    links = nodes.bullet_list()
    for words, address in (("Lesson", lesson), ("Notebook to download", notebook)):
        link = nodes.reference("", words, refuri=address.replace("//", "/"), internal=True)
        links += nodes.list_item("", nodes.paragraph("", "", link))
    bar = nodes.container("", links, classes=["lesson-bar"])
    title.parent.insert(title.parent.index(title) + 1, bar)


def resolve_root(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Make relative addresses of those that are named from the root of the site."""
    up = "../" * docname.count("/")
    for reference in doctree.findall(nodes.reference):
        address = reference.get("refuri", "")
        if address.startswith(ROOT):
            reference["refuri"] = up + address.removeprefix(ROOT)
            reference["internal"] = True
