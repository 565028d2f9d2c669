"""The menu beside every page: made once, and then only turned to the page that it stands on.

Sphinx makes it anew for every page, of more than a hundred entries, which takes a third of the
time of the whole build. From page to page only two things differ: where an address starts from, and
which entries are open because the page is inside them.
"""

from __future__ import annotations

import posixpath
import re
from functools import partial
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

PIECE = re.compile(r'<li class="([^"]*)">|(</li>)|<a class="([^"]*)" href="([^"]*)">')


class Navigation:
    """The menu's HTML, with addresses from the root of the site, in pieces that can be turned."""

    def __init__(self) -> None:
        self.pieces: list[str | tuple[str, str]] = []  # text, or what an entry's tag is made of
        self.inside: dict[str, set[int]] = {}  # by address, the pieces of the entries around it

    def offer(
        self, app: Sphinx, page: str, _: str, context: dict[str, Any], __: nodes.document | None
    ) -> None:
        """Give a page this menu in place of Sphinx's own."""
        if "toctree" in context:
            context["toctree"] = partial(self.turned, f"{page}.html", context["toctree"])

    def turned(self, page: str, ask: Any, **how: Any) -> str:
        """Return the menu as it stands on a page; `ask` makes it, the first time."""
        if not self.pieces:
            self.read(ask(**how), page)
        open_entries = self.inside.get(page, set())
        up = "../" * page.count("/")
        parts = []
        for number, piece in enumerate(self.pieces):
            if isinstance(piece, str):
                parts.append(piece)
            elif piece[0] == "li":
                current = " current" if number in open_entries else ""
                parts.append(f'<li class="{piece[1]}{current}">')
            else:
                address = "#" if piece[1] == page else f"{up}{piece[1]}"
                current = "current " if address == "#" else ""
                parts.append(f'<a class="{current}{piece[0]}" href="{address}">')
        return "".join(parts)

    def read(self, html: str, page: str) -> None:
        """Take the menu of one page to pieces."""
        html = html.replace('<ul class="current">', "<ul>")
        end, around = 0, list[int]()
        for found in PIECE.finditer(html):
            self.pieces.append(html[end : found.start()])
            end = found.end()
            entry, closed, kind, address = found.groups()
            if entry is not None:
                around.append(len(self.pieces))
                self.pieces.append(("li", entry.replace(" current", "")))
            elif closed:
                around.pop()
                self.pieces.append(closed)
            else:
                there = posixpath.normpath(posixpath.join(posixpath.dirname(page), address))
                there = page if address == "#" else there
                self.inside[there] = set(around)
                self.pieces.append((kind.replace("current ", ""), there))
        self.pieces.append(html[end:])
