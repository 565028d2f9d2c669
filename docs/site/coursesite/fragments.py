"""Directives that put a piece of HTML into a page: a player, an interactive figure, the map.

```{player} 02_ring_all_reduce        the first player of that notebook; with :front:, small and at play
```{interactive} zero                 a figure of `figures/`
```{map}                              the course's drawing, whose lessons are links
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from figures.fragment import DATA, fragment
from sphinx.util.docutils import SphinxDirective

from coursesite.drawing import as_svg
from coursesite.lessons import first_player, lesson_folders
from coursesite.paths import drawing_of

REPOSITORY = Path(__file__).parents[3]
ROW = 52  # pixels of a rank's row
HERE, THERE = '"file":"this notebook"', '"file":"the notebook"'  # where a line of a run is
STILL = """<noscript><p>Scripts are off here: <a href="{notebook}">the notebook</a> has key frames of this run
as a picture.</p></noscript>"""
PLAY = """
if (!matchMedia("(prefers-reduced-motion: reduce)").matches)
  document.querySelector(".front-player [data-go=play]").click();
"""


class Player(SphinxDirective):
    """The first player of a notebook."""

    required_arguments = 1
    option_spec = {"front": directives.flag}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        """Return its HTML."""
        file = REPOSITORY / "notebooks" / f"{self.arguments[0]}.ipynb"
        self.env.note_dependency(str(file))
        page = first_player(file).html.replace(HERE, THERE)
        up = "../" * self.env.docname.count("/")
        still = STILL.format(notebook=f"{up}notebooks/{file.stem}.html")
        return [html((at_play(page) if "front" in self.options else page) + still)]


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
        return [
            html(f'<div class="wide-map" tabindex="0" role="group" aria-label="map">{drawn}</div>')
        ]


def at_play(page: str) -> str:
    """Return a player that takes less room, and plays from the start until somebody touches it.

    It shows the code of one rank at a time, so its rows need no room for code. Whoever prefers
    less motion has to press play.
    """

    def smaller(found: re.Match[str]) -> str:
        data = json.loads(found[1])
        data["grid"]["row"] = ROW
        return found[0].replace(found[1], json.dumps(data, separators=(",", ":")))

    page = re.sub(r'<script type="application/json">(.*?)</script>', smaller, page, flags=re.S)
    return f'<div class="front-player">{page}</div><script>{PLAY}</script>'


def html(text: str) -> nodes.Node:
    """Return HTML as a node of a page."""
    return nodes.raw("", text, format="html")
