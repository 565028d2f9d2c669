"""A file of the package that a text names in code, as `minidist/ring.py`, becomes a link
to its lines, and a page of `docs/` a link to this page.

Names may leave out `minidist/`, and on a page of the reference the folder of that page.
"""

from __future__ import annotations

from pathlib import Path

from docutils import nodes

from coursesite.links import ROOT, source_page


def link_named_files(doctree: nodes.document, repository: Path, folder: str = "") -> None:
    """Wrap each such name in a link."""
    for literal in list(doctree.findall(nodes.literal)):
        if isinstance(literal.parent, nodes.reference | nodes.title):
            continue
        if page := page_of(literal.astext(), repository, folder):
            link = nodes.reference("", "", refuri=f"{ROOT}{page}", internal=True)
            literal.parent.replace(literal, link)
            link += literal


def page_of(name: str, repository: Path, folder: str) -> str:
    """Return the page of a file that a text names, from the root of the site, or nothing."""
    if name.startswith("docs/") and name.endswith(".md") and (repository / name).is_file():
        return name.replace("README.md", "index.md").removesuffix(".md") + ".html"
    for before in ("", "minidist/", f"{folder}/"):
        file = f"{before}{name}"
        if file.startswith("minidist/") and file.endswith(".py") and (repository / file).is_file():
            return source_page(file)
    return ""
