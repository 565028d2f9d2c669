"""A file of the package that a text names in code, as `minidist/collectives/ring.py`, becomes a link
to its lines.

Names may leave out `minidist/`, and on a page of the reference the folder of that page.
"""

from __future__ import annotations

from pathlib import Path

from docutils import nodes

from coursesite.links import ROOT, source_page


def link_named_files(doctree: nodes.document, repository: Path, folder: str = "") -> None:
    """Wrap each such name in a link."""
    for literal in list(doctree.findall(nodes.literal)):
        name = literal.astext()
        if not name.endswith(".py") or isinstance(literal.parent, nodes.reference | nodes.title):
            continue
        for before in ("", "minidist/", f"{folder}/"):
            file = f"{before}{name}"
            if file.startswith("minidist/") and (repository / file).is_file():
                link = nodes.reference("", "", refuri=f"{ROOT}{source_page(file)}", internal=True)
                literal.parent.replace(literal, link)
                link += literal
                break
