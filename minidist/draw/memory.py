"""The account as a picture: what was held, stacked over time, a panel for each rank.

bytes │      ▗▄▟█▙▄▖
      │   ▗▟███████▙▖        each category lies on those below it: the upper edge is the total
      │▄▄▟███████████▄▄
      └─────────────── time
"""

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from minidist.draw.table import format_bytes
from minidist.memory.account import Timeline, total

# Bottom first: what stays, then what comes and goes. Colours of Okabe & Ito 2008, told apart by the
# colour-blind and, by their lightness and the white lines between them, in grey print.
STACK = {
    "parameters": "#0072B2",
    "optimizer": "#56B4E9",
    "gradients": "#009E73",
    "communication": "#CC79A7",
    "activations": "#E69F00",
}


def draw_memory(timelines: Sequence[Timeline], path: str | Path | IO[bytes]) -> None:
    """Draw the timelines of ranks 0, 1, ... to a file whose suffix tells the format (png, pdf,
    svg).

    Each sample is a time in seconds and the bytes of each category then. All panels share their
    axes, so heights can be compared. Needs matplotlib.

    Raises
    ------
    ValueError
        If there is no timeline, or one of them has no sample.
    """
    if not timelines or not all(timelines):
        raise ValueError(
            "nothing was sampled: give the timeline of at least one account, after "
            "account.recording()"
        )
    from matplotlib.figure import Figure

    begin = min(timeline[0][0] for timeline in timelines)
    end = max(timeline[-1][0] for timeline in timelines)
    seconds, scale = _unit(end - begin, (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)))
    top = max(total(held) for timeline in timelines for _, held in timeline)
    prefix, bytes = _unit(
        top, (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("bytes", 1.0))
    )
    figure = Figure(figsize=(7.5, 1.2 + 1.9 * len(timelines)), layout="constrained")
    panels = figure.subplots(len(timelines), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for rank, (panel, timeline) in enumerate(zip(panels, timelines, strict=True)):
        _stack(panel, timeline, begin, end, scale, bytes)
        panel.set_ylabel(f"rank {rank}\n{prefix}" if len(timelines) > 1 else prefix)
    panels[-1].set(ylim=(0, 1.15 * top / bytes or 1), xlabel=f"time ({seconds})")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="outside upper center", ncols=len(STACK), frameon=False
    )
    figure.savefig(path, dpi=200)


def _stack(
    panel: Any, timeline: Timeline, begin: float, end: float, scale: float, bytes: float
) -> None:
    """Draw one rank. What a sample found counts until the next sample."""
    times = [(moment - begin) / scale for moment, _ in timeline] + [(end - begin) / scale]
    held = [each for _, each in timeline] + [timeline[-1][1]]
    layers = [[each[name] / bytes for each in held] for name in STACK]
    panel.stackplot(
        times,
        layers,
        labels=STACK,
        colors=STACK.values(),
        step="post",
        edgecolor="white",
        linewidth=0.3,
    )
    when, peak = max(zip(times, map(total, held), strict=True), key=lambda sample: sample[1])
    panel.annotate(
        f"peak {format_bytes(peak)}",
        (when, peak / bytes),
        (0, 3),
        textcoords="offset points",
        ha="center",
    )
    panel.margins(x=0)
    panel.spines[["top", "right"]].set_visible(False)


def _unit(largest: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """Return the first unit whose size is at most `largest`, or else the last unit."""
    return next((unit for unit in units if largest >= unit[1]), units[-1])
