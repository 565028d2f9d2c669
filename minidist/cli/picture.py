"""`python -m minidist picture`: what `make demo` has measured, in one picture, and the same in
words.

    loss │╲            bytes │▌parameters▌gradients▌optimizer▌activations▌    DDP
         │  ╲___             │▌▌▌▌activations▌                                ZeRO-3
         └──────── step      └─────────────────────────────────────────────

The losses are of a run and of the same run on one rank: files of `train --verify --metrics`. The
bytes are those of a rank, by stage: the file of `stages --metrics`.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minidist.draw.memory import STACK
from minidist.draw.table import aligned, format_bytes
from minidist.full.data.files import FileError, at, read_text, retold
from minidist.full.launch.parser import Parser
from minidist.full.options import NOT_NEGATIVE

COMMAND = "minidist picture"
Curve = list[tuple[int, float]]


class PictureError(ValueError):
    """There is nothing to draw, in a sentence."""


def main(argv: Sequence[str]) -> int:
    """Say what was measured, and draw it.

    Return the exit status: 0, or 2 for input that cannot be used.
    """
    parser = Parser(
        prog=COMMAND, description="The losses of two runs, and the bytes of each stage."
    )
    two = "metrics of a run and of the serial one"
    parser.add_argument("--losses", type=Path, nargs=2, required=True, metavar="FILE", help=two)
    parser.add_argument(
        "--stages", type=Path, required=True, metavar="FILE", help="metrics of `stages`"
    )
    parser.add_argument(
        "--to", type=Path, required=True, metavar="FILE", help="the picture: .png, .svg or .pdf"
    )
    options = parser.parse_args(argv)
    try:
        ours, serial = (losses(file) for file in options.losses)
        held = stages(options.stages)
        print(in_words(ours, serial, held))
        with retold(
            PictureError, OSError, ValueError, before=f"--to {options.to} cannot be written: "
        ):
            draw(ours, serial, held, options.to)
    except ImportError:
        print("no picture: it takes matplotlib (pip install matplotlib)")
        return 0
    except PictureError as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 2
    print(f"picture: {options.to.resolve()}")
    return 0


def losses(file: Path) -> Curve:
    """Return the steps and losses in a file of metrics; a loss that was no number is left out."""
    with retold(PictureError, FileError, before=f"{file} "):
        rows = [
            (at(line, "step", kind=int), at(line, "loss", kind=float, default=None))
            for line in _lines(file)
        ]
    found = [(step, loss) for step, loss in rows if loss is not None]
    if not found:
        raise PictureError(f"{file} has no loss: give a file that train --metrics has written")
    return found


def stages(file: Path) -> dict[str, dict[str, int]]:
    """Return what each stage holds: bytes by category."""
    with retold(PictureError, FileError, before=f"{file} "):
        rows = [(at(line, "name", kind=str), at(line, "held", kind=dict)) for line in _lines(file)]
        found = {name: _bytes(held) for name, held in rows}
    if not found:
        raise PictureError(f"{file} has no stage: give a file that stages --metrics has written")
    return found


def _bytes(held: dict[str, Any]) -> dict[str, int]:
    return {
        kind: at(held, kind, kind=int, limit=NOT_NEGATIVE, default=0)
        for kind in [*STACK, "at once"]
    }


def _lines(file: Path) -> list[Any]:
    try:
        return [json.loads(line) for line in read_text(file).splitlines() if line.strip()]
    except ValueError as error:
        raise FileError(
            str(error) if isinstance(error, FileError) else f"is not JSON ({error})"
        ) from None


def in_words(ours: Curve, serial: Curve, held: dict[str, dict[str, int]]) -> str:
    """Return what the picture shows."""
    alone = dict(serial)
    apart = [abs(loss - alone[step]) / abs(alone[step]) for step, loss in ours if alone.get(step)]
    rows = [[name, format_bytes(bytes["at once"]), *(format_bytes(bytes[kind]) for kind in STACK)]
            for name, bytes in held.items()]  # fmt: skip
    same = (
        f"they differ by at most {max(apart):.0e} of it at any step"
        if apart
        else "they share no step"
    )
    ends = [f"{curve[0][1]:.4f} -> {curve[-1][1]:.4f}" for curve in (ours, serial)]
    table = aligned(["bytes held by a rank", "at once", *STACK], rows)
    return f"loss, parallel {ends[0]}, serial {ends[1]}: {same}\n{table}"


def draw(ours: Curve, serial: Curve, held: dict[str, dict[str, int]], path: Path) -> None:
    """Draw both losses, and under them a bar for each stage. Needs matplotlib."""
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(8, 3.6 + 0.38 * len(held)), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=[3, 1 + 0.38 * len(held)])
    above.plot(
        *zip(*serial, strict=True),
        color="#E69F00",
        linewidth=5,
        alpha=0.6,
        label="one rank, no strategy",
    )
    above.plot(*zip(*ours, strict=True), color="#0072B2", linewidth=1.2, label="parallel")
    above.set(xlabel="step", ylabel="loss", title="The parallel run is the serial run")
    above.legend(frameon=False)
    left = [0.0] * len(held)
    for kind, colour in STACK.items():
        widths = [bytes[kind] / 2**20 for bytes in held.values()]
        below.barh(
            range(len(held)),
            widths,
            left=left,
            color=colour,
            edgecolor="white",
            linewidth=0.5,
            label=kind,
        )
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    below.set_yticks(range(len(held)), list(held), fontsize=8)
    below.set(
        xlabel="most MiB of each kind that a rank holds", title="What each stage of ZeRO holds"
    )
    below.invert_yaxis()
    below.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)
    for panel in (above, below):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)
