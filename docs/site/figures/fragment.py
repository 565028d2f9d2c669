"""A figure as a fragment of HTML that needs nothing else: `fragment("zero")`.

Without scripts, and in print, it shows the picture of the first choices and the same numbers as a
table. With them, the script of `figure.html` draws what a reader chooses, in the same way.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA = HERE / "data"
IDLE = -1
# pixels, as in the script
WIDTH, STEP, NAME, BAR, LETTER = 640, 48, 17, 22, 7
OF_TEXT = 6.6  # pixels a letter, on average
EDGE = 0.7  # pixels of ink around a block, so that a dark one shows on a dark ground


def data_of(name: str) -> dict[str, Any]:
    """Return the committed numbers of a figure."""
    read: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return read


def fragment(name: str) -> str:
    """Return the HTML of a figure."""
    data = data_of(name)
    start = [choice["start"] for choice in data["choices"]]
    state = data["states"]["/".join(start)]
    named = (f"{choice['name']} {choice['start']}" for choice in data["choices"])
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    for mark in "<>&\u2028\u2029":  # so that no text can end the script
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    filled = {
        "title": escape(data["title"]),
        "question": escape(data["question"]),
        "choices": "".join(control(choice) for choice in data["choices"]),
        "said": escape(state["said"]),
        "picture": picture(state, data["kinds"]),
        "key": key(state, data["kinds"]),
        "table": table(state, data),
        "command": escape(data["command"]),
        "commit": escape(data["commit"]),
        "chosen": escape(", ".join(named)),
        "data": text,
    }
    page = (HERE / "figure.html").read_text(encoding="utf-8")
    for mark, value in filled.items():
        page = page.replace("{{" + mark + "}}", value)
    return page


def control(choice: dict[str, Any]) -> str:
    """Return the list or the slider of a choice, inside its label."""
    name, values, start = escape(choice["name"]), choice["values"], choice["start"]
    if choice["slider"]:
        last, at = len(values) - 1, values.index(start)
        slider = f'<input type="range" min="0" max="{last}" value="{at}" autocomplete="off">'
        return f"<label>{name} {slider}<output>{escape(start)}</output></label>"
    options = "".join(
        f"<option{' selected' if value == start else ''}>{escape(value)}</option>"
        for value in values
    )
    return f'<label>{name} <select autocomplete="off">{options}</select></label>'


def picture(state: dict[str, Any], kinds: list[dict[str, str]]) -> str:
    """Return the picture of a state as SVG."""
    height = len(state["rows"]) * STEP + 4
    if not state["rows"]:
        return ""
    scale = (WIDTH - 2) / (state["length"] or 1)
    said = escape(state["said"])
    head = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {head} role="img" aria-label="{said}">']
    for number, (name, blocks, note) in enumerate(state["rows"]):
        parts += names(name, note, number * STEP)
        parts += bar(blocks, kinds, number * STEP + NAME, scale)
    if "limit" in state:
        place, words = state["limit"]
        x = 1 + place * scale
        anchor, aside = ("end", -4) if place * scale > WIDTH / 2 else ("start", 4)
        dashes = 'stroke="var(--ink)" stroke-dasharray="4 3" stroke-width="2"'
        parts.append(f'<path d="M{x:.2f} 14V{height}" {dashes}></path>')
        told = f'text-anchor="{anchor}" dx="{aside}"'
        parts.append(f'<text x="{x:.2f}" y="{height}" {told}>{escape(words)}</text>')
    return "".join([*parts, "</svg>"])


def names(name: str, note: str, top: float) -> list[str]:
    """Return the texts above a bar."""
    if note and (len(name) + len(note)) * OF_TEXT > WIDTH:
        return [f'<text x="1" y="{top + 13}">{escape(name)}: {escape(note)}</text>']
    left = f'<text x="1" y="{top + 13}">{escape(name)}</text>'
    right = f'x="{WIDTH - 1}" y="{top + 13}" text-anchor="end"'
    return [left, f"<text {right}>{escape(note)}</text>"]


def bar(
    blocks: list[list[Any]], kinds: list[dict[str, str]], top: float, scale: float
) -> list[str]:
    """Return the blocks of a row."""
    parts, left = [], 1.0
    for length, kind, *label in blocks:
        wide = length * scale
        fill = "var(--gap)" if kind == IDLE else kinds[kind]["colour"]
        stroke = "none" if kind == IDLE or wide < 2 else "var(--ink)"
        place = f'x="{left:.2f}" y="{top}" width="{wide:.2f}" height="{BAR}"'
        parts.append(f'<rect {place} fill="{fill}" stroke="{stroke}" stroke-width="{EDGE}"></rect>')
        if label and len(str(label[0])) * LETTER + 2 < wide:
            place = f'x="{left + wide / 2:.2f}" y="{top + 15}" text-anchor="middle"'
            parts.append(
                f'<text {place} fill="{kinds[kind]["ink"]}">{escape(str(label[0]))}</text>'
            )
        left += wide
    return parts


def used(state: dict[str, Any], kinds: list[dict[str, str]]) -> list[int]:
    """Return the kinds that a state shows."""
    there = {block[1] for _, blocks, _ in state["rows"] for block in blocks}
    return [kind for kind in range(len(kinds)) if kind in there]


def key(state: dict[str, Any], kinds: list[dict[str, str]]) -> str:
    """Return what the colours mean."""
    return "".join(
        f'<li><i style="background: {kinds[kind]["colour"]}"></i>{escape(kinds[kind]["name"])}</li>'
        for kind in used(state, kinds)
    )


def table(state: dict[str, Any], data: dict[str, Any]) -> str:
    """Return the numbers of a state as the rows of a table."""
    kinds = used(state, data["kinds"])
    titles = [data["unit"], *(data["kinds"][kind]["name"] for kind in kinds), ""]
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    rows = [f"<thead><tr>{head}</tr></thead><tbody>"]
    for name, blocks, note in state["rows"]:
        sums = [sum(block[0] for block in blocks if block[1] == kind) for kind in kinds]
        cells = "".join(f"<td>{number:,.{data['digits']}f}</td>" for number in sums)
        start = f'<tr><th scope="row">{escape(name)}</th>'
        rows.append(f"{start}{cells}<td>{escape(note)}</td></tr>")
    return "".join([*rows, "</tbody>"])
