"""A recording as a picture: key frames, for places that run no script.

    before          8 of 68         16 of 68
    rank 0 [0  ]    rank 0 [0 2]    rank 0 [012]        each frame is the player's picture, without the source lines
    rank 1 [ 1 ]    rank 1 [01 ]    rank 1 [012]
    rank 2 [  2]    rank 2 [ 12]    rank 2 [012]

A frame shows all ranks at one moment of Lamport's clock, after its last step.
"""

from pathlib import Path
from typing import IO, Any

from minidist.draw.player import (
    COLOURS,
    INKS,
    LEFT,
    MET,
    PLACE,
    PLACES,
    SIDE,
    Contents,
    Does,
    Grid,
    Recording,
    words,
)

INK = "#1f2328"
FAINT = "#59636e"
MARK = "#0550ae"
BAD = "#b42318"
INCH = 100  # pixels of the grid
MARGIN = 20
TOWARDS = {Does.SENDS: "to", Does.RECEIVES: "from", Does.WAITS: "for"}


def filmstrip(recording: Recording, path: str | Path | IO[bytes], frames: int = 6) -> None:
    """Draw key frames, from the first step to the last, to a file whose suffix tells the format
    (png, pdf, svg).

    Needs matplotlib.

    Raises
    ------
    ValueError
        For fewer than two frames.
    """
    counts = key_frames(recording, frames)
    from matplotlib.figure import Figure

    grid = Grid(recording, row=46)
    across = min(len(counts), 2 if grid.width > 600 else 3)
    down = -(-len(counts) // across)
    size = (across * (grid.width + MARGIN) / INCH, down * (grid.height + 3 * MARGIN) / INCH)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for panel in panels:
        panel.set_axis_off()
    for panel, count in zip(panels, counts, strict=False):
        _frame(panel, recording, grid, count)
    figure.savefig(path, dpi=INCH * 1.5)


def in_words(recording: Recording, frames: int = 6) -> str:
    """Return a filmstrip in words: the event of each frame, and the contents of every rank at the
    end.
    """
    counts = key_frames(recording, frames)
    told = [f"after {count}: {recording.steps[count - 1].text}" for count in counts if count]
    ends = []
    for step in recording.at(len(recording.steps)):
        every = [
            (name, number)
            for name, cells in step.buffers.items()
            if name != MET
            for number in range(len(cells))
        ]
        ends.append(
            f"rank {step.rank} holds "
            f"{words(every, step.buffers, len(recording.start)) or 'nothing shown'}"
        )
        if recording.meetings.tokens:
            ends.append(
                recording.meetings.words(
                    step.rank, step.buffers[MET], recording.start[step.rank].buffers[MET]
                )
            )
    what = f"Key frames of a run of {len(recording.start)} ranks in {len(recording.steps)} events"
    return f"{what}: {'; '.join(told)}. At the end: {'; '.join(ends)}."


def key_frames(recording: Recording, frames: int) -> list[int]:
    """Return the number of steps before each frame: evenly spread over the moments, from the
    beginning to the end.
    """
    if frames < 2:
        raise ValueError(f"frames={frames}: a filmstrip has at least 2, the beginning and the end")
    steps, last = recording.steps, len(recording.steps)
    moments = [(step.seconds, step.moment) for step in steps]
    whole = [0, *(index for index in range(1, last) if moments[index] != moments[index - 1]), last]
    return sorted(
        {whole[round(frame * (len(whole) - 1) / (frames - 1))] for frame in range(frames)}
    )


def _frame(panel: Any, recording: Recording, grid: Grid, count: int) -> None:
    """Draw all ranks after `count` steps, and the messages that are under way or have just come."""
    panel.set(xlim=(0, grid.width), ylim=(grid.height, 0), aspect="equal")
    last = len(recording.steps)
    title = f"after {count} of {last} events"
    if recording.deadlock and count == last:
        title += ": deadlock"
    panel.set_title(title if count else "before the first event", color=INK, fontsize=9.5)
    for name, left in grid.left.items():
        panel.text(left, 14, name, color=FAINT, fontsize=8, va="center")
    for step in recording.at(count):
        middle, towards = grid.middle(step.rank), TOWARDS.get(step.kind)
        panel.text(
            0,
            middle - 8,
            f"rank {step.rank}",
            color=INK,
            fontsize=8,
            fontweight="bold",
            va="center",
        )
        said = f"{step.kind} {towards} {step.peer}" if towards else step.kind
        panel.text(
            0,
            middle + 9,
            said,
            color=BAD if step.kind == Does.WAITS else FAINT,
            fontsize=7.5,
            va="center",
        )
        for name in grid.columns:
            for number, contents in enumerate(step.buffers.get(name, ())):
                _cell(panel, grid, *grid.cell(step.rank, name, number), contents)
    if recording.meetings.tokens:
        _square(panel, recording, grid, count)
    _arrows(panel, recording, grid, count)


def _square(panel: Any, recording: Recording, grid: Grid, count: int) -> None:
    """Draw which queries, in rows, have met which keys, in columns, each in the colour of its
    rank.
    """
    from matplotlib.patches import Rectangle

    panel.text(grid.square, 14, MET, color=FAINT, fontsize=8, va="center")
    for token, owner in enumerate(recording.meetings.owners):
        _place(panel, *grid.pair(token, -1), SIDE, owner, f"{token}")
        _place(panel, *grid.pair(-1, token), SIDE, owner, f"{token}")
    for step in recording.at(count):
        for query, met in zip(recording.meetings.tokens[step.rank], step.buffers[MET], strict=True):
            for key, owner in enumerate(recording.meetings.owners):
                corner = grid.pair(query, key)
                if met[key]:
                    _place(panel, *corner, SIDE, owner, f"{owner}")
                ground = FAINT if key > query else "none"
                panel.add_patch(
                    Rectangle(
                        corner, SIDE, SIDE, facecolor=ground, edgecolor=FAINT, lw=0.5, alpha=0.3
                    )
                )


def _place(panel: Any, x: float, y: float, width: int, rank: int, shown: str) -> None:
    """Draw a place in the colour of the rank that it is from, with a text on it."""
    from matplotlib.patches import Rectangle

    colour, ink = COLOURS[rank % len(COLOURS)], INKS[rank % len(INKS)]
    panel.add_patch(Rectangle((x, y), width, SIDE, facecolor=colour, edgecolor="none"))
    panel.text(x + width / 2, y + SIDE / 2, shown, color=ink, fontsize=7, ha="center", va="center")


def _cell(panel: Any, grid: Grid, x: int, y: int, contents: Contents) -> None:
    """Draw a cell: a place for each rank, coloured and numbered if its contribution is there."""
    from matplotlib.patches import Rectangle

    width, height, style = grid.cell_width, grid.cell_height, ":" if contents == "" else "-"
    if isinstance(contents, str):
        panel.text(
            x + width / 2,
            y + height / 2,
            contents,
            color=FAINT,
            fontsize=7,
            ha="center",
            va="center",
        )
    else:
        for rank, times in enumerate(contents):
            if times:
                left, top = x + rank % PLACES * PLACE, y + rank // PLACES * (PLACE + 2)
                _place(
                    panel, left, top, PLACE, rank, f"{rank}" if times == 1 else f"{rank}$^{times}$"
                )
    panel.add_patch(
        Rectangle(
            (x, y), width, height, fill=False, edgecolor=FAINT, linewidth=0.8, linestyle=style
        )
    )


def _arrows(panel: Any, recording: Recording, grid: Grid, count: int) -> None:
    """Draw the messages in the margin: those under way, those just received, and what a rank waits
    for in vain.
    """
    steps = recording.steps[:count]
    waiting = {(step.rank, step.peer) for step in steps if step.kind == Does.WAITS}
    for step in recording.under_way(count):
        if (step.rank, step.peer) not in waiting:
            _arrow(panel, grid, step.rank, step.peer, FAINT)
    for rank, peer in sorted(waiting):
        _arrow(panel, grid, rank, peer, BAD)
    for step in steps:
        if step.kind == Does.RECEIVES and (step.seconds, step.moment) == (
            steps[-1].seconds,
            steps[-1].moment,
        ):
            _arrow(panel, grid, step.peer, step.rank, MARK)


def _arrow(panel: Any, grid: Grid, start: int | None, end: int | None, colour: str) -> None:
    """Draw a curve between two rows, wider if they are farther apart.

    A message that is under way is in its middle.
    """
    assert start is not None and end is not None
    down, x = 1 if end > start else -1, LEFT - 10
    begin, reached = grid.middle(start) + 6 * down, grid.middle(end) - 6 * down
    bulge = 20 + 40 * (abs(end - start) - 1) / max(1, grid.ranks - 2) + (8 if down < 0 else 0)
    bend = {
        "connectionstyle": f"arc3,rad={1.5 * bulge / (reached - begin)}",
        "shrinkA": 0,
        "shrinkB": 0,
    }
    look = {
        "arrowstyle": "-|>",
        "color": colour,
        "linestyle": "--" if colour == BAD else "-",
        "linewidth": 1.2,
    }
    panel.annotate("", (x, reached), (x, begin), arrowprops=bend | look)
    if colour == FAINT:
        middle = x - 0.75 * bulge, (begin + reached) / 2
        panel.plot(*middle, "o", color=colour, markerfacecolor="white", markersize=5, zorder=4)
