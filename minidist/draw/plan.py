"""A plan as a picture: a GPU's memory, and a step as a line of time, with a bar for each layout.

tp=4 pp=4 dp=4    ▐ parameters ▌ gradients ▌ optimizer ▌ activations ▌   ┊ 80 GB
tp=8 pp=2 dp=4    ▐ computing            ▌ recomputing ▌ tensor ▌ bubble ▌ data ▌
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple


class Look(NamedTuple):
    """How a kind is drawn. In grey print, kinds of one lightness differ in their hatching."""

    colour: str
    hatch: str = ""


# A kind has the same look in every picture, however many show. Colours of Okabe & Ito 2008 are told
# apart by the colour-blind; there are eight, so some that are rarely seen have the dark ones of Tol
# 2021, or a grey.
BYTES = {
    "parameters": Look("#0072B2"),
    "gradients": Look("#009E73", "||"),
    "optimizer": Look("#56B4E9", "//"),
    "activations": Look("#E69F00"),
    "logits": Look("#F0E442"),
    "communication": Look("#CC79A7", "xx"),
    "workspace": Look("#332288", ".."),
    "resident": Look("#999999", "\\\\"),
}
STEP = {
    "computing": Look("#0072B2"),
    "recomputing": Look("#332288", ".."),
    "tensor": Look("#E69F00"),
    "context": Look("#F0E442"),
    "expert": Look("#CC79A7", "xx"),
    "sharding": Look("#D55E00"),
    "host": Look("#AA4499", "oo"),
    "pipeline": Look("#882255", "--"),
    "bubble": Look("#BBBBBB"),
    "data": Look("#009E73", "||"),
    "optimizer": Look("#56B4E9", "//"),
    "input": Look("#999933", "++"),
    "other": Look("#777777", "\\\\"),
}
SHOWN = 0.004  # of the longest bar: what is shorter has no colour that could be seen
COLUMNS = 7  # of a legend
WRAPPED = 150  # letters of a line below a picture
LINES = [
    (colour, dash)
    for dash in ("-", "--")
    for colour in ("#0072B2", "#009E73", "#E69F00", "#D55E00")
]


def draw_plan(
    names: Sequence[str],
    bytes: Sequence[Mapping[str, float]],
    steps: Sequence[Mapping[str, float]],
    room: float,
    path: str | Path,
    title: str = "",
    ranges: Sequence[tuple[float, float] | None] = (),
    said: str = "",
) -> None:
    """Draw layouts by name, best first: bytes by category beside the `room` of a GPU, and seconds
    of a step by kind, with the `ranges` in which they may lie and what is `said` of these.

    The suffix of `path` tells the format (png, svg, pdf). Needs matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.6 + 0.3 * bool(title) + 0.62 * len(names)), layout="constrained")
    panels = figure.subplots(2, 1)
    if title:
        figure.suptitle(title, fontsize=11)
    gigabytes = []
    for each in bytes:
        gigabytes.append({category: count / 1e9 for category, count in each.items()})
    _bars(panels[0], names, gigabytes, BYTES, "GB of a GPU", room / 1e9)
    panels[0].axvline(room / 1e9, color="black", linestyle=":", linewidth=1)
    panels[0].annotate(
        f"{room / 1e9:.0f} GB", (room / 1e9, -0.45), ha="right", va="bottom", fontsize=8
    )
    known = [(place, around) for place, around in enumerate(ranges) if around]
    longest = max((around[1] for _, around in known), default=0.0)
    unit = "seconds of a step, one after the other"
    if known:
        unit += "; black: its range"
    _bars(panels[1], names, steps, STEP, unit, longest)
    for place, around in known:
        panels[1].plot(around, (place, place), color="black", linewidth=1.2, marker="|")
    if said:
        words = "\n".join(wrap(said.replace("\n", "; "), WRAPPED))
        figure.text(0.01, -0.01, words, fontsize=8, va="top")
    figure.savefig(Path(path), dpi=160, bbox_inches="tight")


def _bars(
    panel: Any,
    names: Sequence[str],
    values: Sequence[Mapping[str, float]],
    looks: Mapping[str, Look],
    unit: str,
    room: float = 0.0,
) -> None:
    totals = [sum(each.values()) for each in values]
    longest = max(*totals, room)
    left = [0.0] * len(values)
    for kind in values[0]:
        widths = [each[kind] for each in values]
        label = kind if max(widths) > SHOWN * longest else "_"
        look = {
            "color": looks[kind].colour,
            "hatch": looks[kind].hatch,
            "edgecolor": "white",
            "linewidth": 0.5,
        }
        panel.barh(range(len(values)), widths, left=left, label=label, **look)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for place, total in enumerate(totals):
        panel.annotate(
            f"{total:,.1f}",
            (1.01, place),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
        )
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.set_xlim(0, 1.01 * longest)
    panel.set_xlabel(unit)
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(
        loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=COLUMNS, frameon=False, fontsize=8
    )


def draw_sites(
    gigabits: Sequence[float],
    days: Mapping[str, Sequence[float]],
    alone: float,
    there: tuple[float, str],
    path: str | Path,
    title: str = "",
) -> None:
    """Draw the days of a run on several sites, by the bandwidth between them: a line for each way
    to join them, and the wire that there is.

    Parameters
    ----------
    gigabits : sequence of float
        Bandwidths, in Gbit/s.
    days : mapping
        By way, the days at each bandwidth.
    alone : float
        The days of one site alone.
    there : tuple
        The bandwidth that there is, and what wins with it.

    Needs matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), layout="constrained")
    axes = figure.subplots()
    for (name, line), (colour, dash) in zip(days.items(), LINES, strict=False):
        axes.plot(gigabits, line, dash, color=colour, label=name, linewidth=1.8)
    axes.axhline(alone, color="#555555", linewidth=1)
    axes.annotate("one site alone", (gigabits[0], alone), va="bottom", fontsize=9)
    axes.axvline(there[0], color="#555555", linewidth=1, linestyle=":")
    said = f" {there[0]:g} Gbit/s: {there[1]}"
    axes.annotate(said, (there[0], alone * 4), rotation=90, va="bottom", fontsize=9)
    axes.set(xscale="log", yscale="log", xlabel="Gbit/s between the sites", ylabel="days")
    axes.set_xlim(gigabits[0], gigabits[-1])
    fastest = min(min(line) for line in days.values())
    axes.set_ylim(0.7 * min(alone, fastest), 100 * alone)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=9, loc="upper right")
    figure.savefig(path, dpi=110)
