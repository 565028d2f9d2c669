"""A plan as a picture: what a GPU holds, and where a step goes, a bar for each layout.

tp=4 pp=4 dp=4    ▐ parameters ▌ gradients ▌ optimizer ▌ activations ▌   ┊ 80 GB
tp=8 pp=2 dp=4    ▐ computing            ▌ recomputing ▌ tensor ▌ bubble ▌ data ▌
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Colours of Okabe & Ito 2008; a kind has the same in every picture of a plan, in the order in which they are stacked.
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#F0E442", "#CC79A7", "#D55E00", "#999999", "#000000")
SHOWN = 0.004  # of the longest bar: what is shorter has no colour of its own to be seen


def draw_plan(
    names: Sequence[str],
    held: Sequence[Mapping[str, float]],
    steps: Sequence[Mapping[str, float]],
    room: float,
    path: str,
) -> None:
    """Draw layouts by name, best first: bytes by category beside the `room` of a GPU, and seconds of a step by kind.

    The suffix of `path` tells the format (png, svg, pdf). Needs matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.6 + 0.62 * len(names)), layout="constrained")
    panels = figure.subplots(2, 1)
    _bars(panels[0], names, [{kind: bytes / 1e9 for kind, bytes in each.items()} for each in held], "GB of a GPU")
    panels[0].axvline(room / 1e9, color="black", linestyle=":", linewidth=1)
    panels[0].annotate(f"{room / 1e9:.0f} GB", (room / 1e9, -0.45), ha="right", va="bottom", fontsize=8)
    _bars(panels[1], names, steps, "seconds of a step")
    figure.savefig(Path(path), dpi=160)


def _bars(panel: Any, names: Sequence[str], values: Sequence[Mapping[str, float]], unit: str) -> None:
    longest = max(sum(each.values()) for each in values)
    kinds = [kind for kind in values[0] if max(each[kind] for each in values) > SHOWN * longest]
    left = [0.0] * len(values)
    for kind, colour in zip(kinds, COLOURS, strict=False):
        widths = [each[kind] for each in values]
        panel.barh(range(len(values)), widths, left=left, color=colour, edgecolor="white", linewidth=0.5, label=kind)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for place, end in enumerate(left):
        panel.annotate(
            f"{end:.1f}", (end, place), (-3, 0), textcoords="offset points", va="center", ha="right", fontsize=8
        )
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.set_xlim(0, 1.05 * longest)
    panel.set_xlabel(unit)
    panel.invert_yaxis()
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=len(kinds), frameon=False, fontsize=8)
