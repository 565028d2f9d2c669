"""A pipeline as the papers draw it: a row for each rank, a box for each action, the microbatch's
number in it.

rank 0  F0 F1 F2 ............B0--- F3 B1--- ...B2--- ...B3---
rank 1  ...F0 F1 ......B0--- F2 B1--- F3 B2--- ...B3--- ......     the dots are the bubble
rank 2  ......F0 B0--- F1 B1--- F2 B2--- F3 B3--- ............

In the SVG, copies of weights to the host and back are thin bars at the feet of the boxes.

(Huang et al. 2019, figure 2; Narayanan et al. 2021, figures 3 and 4; Qi et al. 2023, figures 2 and
3.)
"""

from html import escape
from pathlib import Path
from string import Template

from minidist.full.pipeline.actions import Action, Kind, Plan
from minidist.full.pipeline.simulate import Timeline

# Okabe & Ito 2008: told apart by the colour-blind. Red, green, blue.
KINDS = {
    Kind.FORWARD: ("forward", (0, 114, 178)),
    Kind.BACKWARD: ("backward", (0, 158, 115)),
    Kind.INPUTS: ("backward for inputs", (204, 121, 167)),
    Kind.WEIGHTS: ("backward for weights", (230, 159, 0)),
    Kind.REDUCE: ("reduction over the data axis", (213, 94, 0)),
    Kind.UPDATE: ("update of the weights", (120, 120, 120)),
    Kind.OFFLOAD: ("weights to the host", (86, 180, 233)),
    Kind.FETCH: ("weights back", (240, 228, 66)),
}
MOST_COLUMNS, MOST_PIXELS = 5_000, 30_000  # a wider drawing is scaled down to this, without labels
# pixels
ROW = 26  # height of a row
BAR = 4  # height of a copy, below it
STEP = 32  # from row to row
LEFT, TOP = 62, 12  # margins
DIGIT = 7  # width


def draw_text(timeline: Timeline) -> str:
    """Return a line of text for each rank, with time from left to right, and a line that says how
    large the bubble is.

    An action is written as its kind and microbatch (`F0`), with its stage in front if a rank holds
    several (`4F0`). Dashes fill the time that it takes; dots are idle time.
    """
    plan = timeline.plan
    longest = 0
    for rank in range(plan.ranks):
        for action, _, _ in timeline.spans(rank):
            longest = max(longest, len(_label(action, plan)))
    room = longest + 1
    scale = min(room / _shortest(timeline), MOST_COLUMNS / (timeline.length or 1.0))
    margin = len(f"rank {plan.ranks - 1}")
    lines = []
    for rank in range(plan.ranks):
        line = ["."] * round(timeline.length * scale)
        for action, start, end in timeline.spans(rank):
            first, last = round(start * scale), round(end * scale)
            width = last - first
            dashed = _label(action, plan).ljust(width - 1, "-")
            line[first:last] = dashed.ljust(width)[:width]
        name = f"rank {rank}".ljust(margin)
        lines.append(f"{name}  {''.join(line)}".rstrip())
    return "\n".join([*lines, _summary(timeline)])


def _label(action: Action, plan: Plan) -> str:
    """Return an action's name, without its stage if each rank has only one."""
    name = str(action)
    return name if plan.stages > plan.ranks else name[len(str(action.stage)) :]


def draw_svg(timeline: Timeline) -> str:
    """Return the text of an SVG file, readable on light and on dark ground.

    The colour tells the kind of an action; a rank's later chunks are lighter than its first. The
    tooltip of a box says which action it is, and when it starts and ends.
    """
    plan = timeline.plan
    digits = len(str(plan.microbatches - 1))
    room = DIGIT * digits + 9
    scale = min(room / _shortest(timeline), MOST_PIXELS / (timeline.length or 1.0))
    right = LEFT + timeline.length * scale
    bottom = TOP + plan.ranks * STEP
    parts = []
    for rank in range(plan.ranks):
        top = TOP + rank * STEP
        chunks = plan.stages_of(rank)
        parts.append(f'<text class="ink" x="8" y="{top + ROW / 2}">rank {rank}</text>')
        parts.append(
            f'<rect class="idle" x="{LEFT}" y="{top}" width="{right - LEFT:.1f}" height="{ROW}"/>'
        )
        for action, start, end in timeline.spans(rank):
            box = _box(action, LEFT + start * scale, LEFT + end * scale, top, chunks)
            parts.append(f"<g><title>{action}: {start:g} to {end:g}</title>{box}</g>")
        for action, start, end in timeline.transfers(rank):
            if end > start:
                bar = _bar(action, LEFT + start * scale, LEFT + end * scale, top, chunks)
                parts.append(f"<g><title>{action}: {start:g} to {end:g}</title>{bar}</g>")
    parts.append(
        f'<path class="line" fill="none" d="M{LEFT} {bottom + 4}H{right:.1f}m-6 -3l6 3l-6 3"/>'
    )
    parts.append(f'<text class="ink" x="8" y="{bottom + 4}">time</text>')
    parts.append(_legend(timeline, bottom + 32))
    parts.append(f'<text class="ink" x="{LEFT}" y="{bottom + 54}">{_summary(timeline)}</text>')
    page = Template(Path(__file__).with_suffix(".svg").read_text(encoding="utf-8"))
    width, height = round(max(right + 12, 660)), bottom + 70
    return page.substitute(
        width=width, height=height, title=escape(plan.name), body="\n".join(parts)
    )


def _box(action: Action, left: float, right: float, top: int, chunks: list[int]) -> str:
    """Return one action: a rectangle, with the microbatch's number in its middle if there is
    room.
    """
    fill, ink = _colours(action.kind, chunks.index(action.stage), len(chunks))
    wide = right - left
    number = "R" if action.kind == Kind.REDUCE else str(action.microbatch)
    box = (
        f'<rect x="{left + 0.5:.1f}" y="{top}" width="{max(wide - 1, 0):.1f}" height="{ROW}" '
        f'rx="2" fill="{fill}"/>'
    )
    if wide >= DIGIT * len(number):
        middle = f'x="{left + wide / 2:.1f}" y="{top + ROW / 2}" text-anchor="middle"'
        box += f'<text {middle} fill="{ink}">{number}</text>'
    return box


def _bar(action: Action, left: float, right: float, top: int, chunks: list[int]) -> str:
    """Return one copy of a stage's weights, below the boxes that are computed meanwhile."""
    fill, _ = _colours(action.kind, chunks.index(action.stage), len(chunks))
    return (
        f'<rect x="{left:.1f}" y="{top + ROW}" width="{right - left:.1f}" height="{BAR}" '
        f'fill="{fill}"/>'
    )


def _colours(kind: Kind, chunk: int, chunks: int) -> tuple[str, str]:
    """Return the colours of a box and of its number. Later chunks of a rank are lighter."""
    light = 0.65 * chunk / max(chunks - 1, 1)
    red, green, blue = (round(shade + (255 - shade) * light) for shade in KINDS[kind][1])
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 100
    return f"#{red:02x}{green:02x}{blue:02x}", "#ffffff" if dark else "#000000"


def _legend(timeline: Timeline, y: int) -> str:
    """Return the legend: each kind of action that takes time, with a square for each chunk."""
    plan = timeline.plan
    used = set()
    for rank in range(plan.ranks):
        spans = timeline.spans(rank) + timeline.transfers(rank)
        used |= {action.kind for action, start, end in spans if end > start}
    chunks = max(len(plan.stages_of(rank)) for rank in range(plan.ranks))
    x = LEFT
    parts = []
    for kind, (name, _) in KINDS.items():
        if kind not in used:
            continue
        for chunk in range(chunks):
            fill, _ = _colours(kind, chunk, chunks)
            parts.append(f'<rect x="{x}" y="{y - 7}" width="14" height="14" rx="2" fill="{fill}"/>')
            x += 16
        parts.append(f'<text class="ink" x="{x + 3}" y="{y}">{name}</text>')
        x += 22 + 7 * len(name)
    return "".join(parts)


def _summary(timeline: Timeline) -> str:
    return f"bubble: {timeline.bubble:.1%} of the step, {timeline.ratio:.1%} of the ideal time"


def _shortest(timeline: Timeline) -> float:
    """Return the length of the shortest action that takes any time: it gets just the room that its
    label needs.
    """
    lengths = []
    for rank in range(timeline.plan.ranks):
        lengths += [end - start for _, start, end in timeline.spans(rank) if end > start]
    return min(lengths, default=1.0)
