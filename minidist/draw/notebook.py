"""Pictures in a notebook. What needs a script is shown as a PNG as well: a notebook that is only
viewed runs none.

    show(record(program, ranks=4))                                  key frames, then the player
    picture(lambda file: draw_memory(timelines, file), "Memory")    whatever draws to a file
    schedules(simulate(plan("gpipe", 4, 8)), ...)                   pipelines, below each other

Each picture comes with words that say what it shows, for readers who cannot see it. Needs IPython,
which every notebook has; a PNG needs matplotlib and Pillow.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

from minidist.draw.filmstrip import filmstrip, in_words
from minidist.draw.player import Recording, player

if TYPE_CHECKING:
    from minidist.full.pipeline import Timeline


def show(recording: Recording, frames: int = 6) -> None:
    """Show key frames of a recording, and below them the player that steps through all of it."""
    from IPython.display import HTML, display

    def draw(file: IO[bytes]) -> None:
        filmstrip(recording, file, frames)

    display(picture(draw, in_words(recording, frames)))
    display(HTML(player(recording)))


def picture(draw: Callable[[IO[bytes]], object], alt: str) -> Shown:
    """Return what `draw(file)` draws, as a PNG of 64 colours, which takes a third of the bytes.

    `alt` says in words what the picture shows.
    """
    from PIL import Image as Pixels

    drawn = io.BytesIO()
    draw(drawn)
    small = io.BytesIO()
    with Pixels.open(drawn) as pixels:
        few_colours = pixels.convert("RGB").quantize(64, dither=Pixels.Dither.NONE)
        few_colours.save(small, "png", optimize=True)
    return Shown("image/png", small.getvalue(), alt)


def schedules(*timelines: Timeline) -> None:
    """Show simulated pipelines, one below the other."""
    from IPython.display import display

    from minidist.draw.pipeline import draw_svg, draw_text

    for timeline in timelines:
        name = timeline.plan.name
        alt = f"Pipeline schedule {name}\n{draw_text(timeline)}"
        display(Shown("image/svg+xml", draw_svg(timeline), alt))


class Shown:
    """A picture, and the words for it: for screen readers, and where only text is shown."""

    def __init__(self, kind: str, data: bytes | str, alt: str) -> None:
        self.kind, self.data, self.alt = kind, data, alt

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        data = {self.kind: self.data, "text/plain": self.alt}
        metadata = {self.kind: {"alt": self.alt}}
        return data, metadata
