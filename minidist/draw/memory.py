"""The account as a picture: the bytes of each category, stacked over time, a panel for each rank.

bytes │      ▗▄▟█▙▄▖
      │   ▗▟███████▙▖        each category lies on those below it: the upper edge is the total
      │▄▄▟███████████▄▄
      └─────────────── time
"""

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from minidist.draw.table import format_bytes
from minidist.full.memory.account import Timeline, total

# Bottom first: what stays, then what comes and goes. Colours of Okabe & Ito 2008, told apart by the
# colour-blind and, by their lightness and the white lines between them, in grey print.
STACK = {
    "parameters": "#0072B2",
    "optimizer": "#56B4E9",
    "gradients": "#009E73",
    "communication": "#CC79A7",
    "activations": "#E69F00",
}

SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
BYTES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("bytes", 1.0))


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
    seconds, scale = _unit(end - begin, SECONDS)
    top = 0
    for timeline in timelines:
        top = max(top, *(total(sample) for _, sample in timeline))
    prefix, bytes = _unit(top, BYTES)
    ranks = len(timelines)
    figure = Figure(figsize=(7.5, 1.2 + 1.9 * ranks), layout="constrained")
    panels = figure.subplots(ranks, 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for rank, timeline in enumerate(timelines):
        _stack(panels[rank], timeline, begin, end, scale, bytes)
        panels[rank].set_ylabel(f"rank {rank}\n{prefix}" if ranks > 1 else prefix)
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
    samples = [*timeline, (end, timeline[-1][1])]
    times = [(moment - begin) / scale for moment, _ in samples]
    layers = []
    for name in STACK:
        layers.append([found[name] / bytes for _, found in samples])
    panel.stackplot(
        times,
        layers,
        labels=STACK,
        colors=STACK.values(),
        step="post",
        edgecolor="white",
        linewidth=0.3,
    )
    totals = [total(found) for _, found in samples]
    peak = max(totals)
    when = times[totals.index(peak)]
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
    for unit in units:
        if largest >= unit[1]:
            return unit
    return units[-1]
