"""A plan as a picture: what a GPU holds, and a step as a line of time, a bar for each layout.

tp=4 pp=4 dp=4    ▐ parameters ▌ gradients ▌ optimizer ▌ activations ▌   ┊ 80 GB
tp=8 pp=2 dp=4    ▐ computing            ▌ recomputing ▌ tensor ▌ bubble ▌ data ▌
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Okabe & Ito 2008: told apart by the colour-blind. A kind has the same colour in every picture, however many show.
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#F0E442", "#D55E00", "#999999", "#000000")
SHOWN = 0.004  # of the longest bar: what is shorter has no colour that could be seen


def draw_plan(
    names: Sequence[str],
    held: Sequence[Mapping[str, float]],
    steps: Sequence[Mapping[str, float]],
    room: float,
    path: str | Path,
) -> None:
    """Draw layouts by name, best first: bytes by category beside the `room` of a GPU, and seconds of a step by kind.

    The suffix of `path` tells the format (png, svg, pdf). Needs matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.6 + 0.62 * len(names)), layout="constrained")
    panels = figure.subplots(2, 1)
    gigabytes = [{kind: bytes / 1e9 for kind, bytes in each.items()} for each in held]
    _bars(panels[0], names, gigabytes, "GB of a GPU", room / 1e9)
    panels[0].axvline(room / 1e9, color="black", linestyle=":", linewidth=1)
    panels[0].annotate(f"{room / 1e9:.0f} GB", (room / 1e9, -0.45), ha="right", va="bottom", fontsize=8)
    _bars(panels[1], names, steps, "seconds of a step, one after the other")
    figure.savefig(Path(path), dpi=160)


def _bars(
    panel: Any, names: Sequence[str], values: Sequence[Mapping[str, float]], unit: str, room: float = 0.0
) -> None:
    totals = [sum(each.values()) for each in values]
    longest, left = max(*totals, room), [0.0] * len(values)
    colours = dict(zip(values[0], COLOURS * 2, strict=False))
    for kind, colour in colours.items():
        widths = [each[kind] for each in values]
        label = kind if max(widths) > SHOWN * longest else "_"
        panel.barh(range(len(values)), widths, left=left, color=colour, edgecolor="white", linewidth=0.5, label=label)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for place, total in enumerate(totals):
        panel.annotate(f"{total:.1f}", (1.01, place), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.set_xlim(0, 1.01 * longest)
    panel.set_xlabel(unit)
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=len(values[0]), frameon=False, fontsize=8)
