"""Pictures in a notebook: each as a PNG as well, since a notebook that is only looked at runs no script.

    show(record(program, ranks=4))                                  key frames, then the player
    picture(lambda file: draw_memory(timelines, file))              whatever draws to a file

Needs IPython, which every notebook has.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import IO, Any

from minidist.draw.filmstrip import filmstrip
from minidist.draw.player import Recording, player


def show(recording: Recording, frames: int = 6) -> None:
    """Show key frames of a recording, and below them the player that steps through all of it."""
    from IPython.display import HTML, display

    display(picture(lambda file: filmstrip(recording, file, frames)))
    display(HTML(player(recording)))


def picture(draw: Callable[[IO[bytes]], object]) -> Any:
    """Return what `draw(file)` draws, as a PNG of 64 colours that a cell shows: a third of the bytes."""
    from IPython.display import Image
    from PIL import Image as Pixels

    drawn, small = io.BytesIO(), io.BytesIO()
    draw(drawn)
    with Pixels.open(drawn) as pixels:
        pixels.convert("RGB").quantize(64, dither=Pixels.Dither.NONE).save(small, "png", optimize=True)
    return Image(data=small.getvalue(), format="png")
