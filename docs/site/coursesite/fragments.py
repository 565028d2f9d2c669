"""Directives that put a piece of HTML into a page: a player, an interactive figure, the map.

    ```{player} 02_ring_all_reduce        the first player of that notebook
    ```{interactive} zero                 a figure of `figures/`
    ```{map}                              the course's drawing, whose lessons are links
"""

from __future__ import annotations

from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from coursesite.drawing import as_svg
from coursesite.lessons import first_to_see, lesson_folders
from coursesite.paths import drawing_of
from figures.fragment import DATA, fragment

REPOSITORY = Path(__file__).parents[3]


class Player(SphinxDirective):
    """The first player of a notebook."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return its HTML."""
        file = REPOSITORY / "notebooks" / f"{self.arguments[0]}.ipynb"
        self.env.note_dependency(str(file))
        return [html(first_to_see(file).html)]


class Interactive(SphinxDirective):
    """An interactive figure."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return its HTML."""
        self.env.note_dependency(str(DATA / f"{self.arguments[0]}.json"))
        return [html(fragment(self.arguments[0]))]


class Map(SphinxDirective):
    """What needs what, in the whole course."""

    def run(self) -> list[nodes.Node]:
        """Return a picture, which is wider than some screens."""
        up = "../" * self.env.docname.count("/")
        addresses = {
            folder[:2]: f"{up}lessons/{folder}/index.html" for folder in lesson_folders(REPOSITORY)
        }
        drawn = as_svg(drawing_of(REPOSITORY), addresses)
        return [html(f'<div class="wide-map" tabindex="0" role="group" aria-label="map">{drawn}</div>')]


def html(text: str) -> nodes.Node:
    """Return HTML as a node of a page."""
    return nodes.raw("", text, format="html")
