"""The page itself.

page(title, facts, steps, events)  ──▶  run.html      curves, memory, a step in time, who waited
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from minidist.draw.page.curves import curve
from minidist.draw.page.timeline import timeline, waits
from minidist.draw.table import format_bytes, format_seconds
from minidist.full.trace.events import Event

CURVES = {
    "loss": "loss, nats a token",
    "eval_loss": "loss on held-out text, nats a token",
    "gradient_norm": "norm of the gradients",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens a second",
    "utilisation": "MFU",
    "communication": "share of the step in messages",
    "bubble": "share of the step that a pipeline idles",
    "compute_seconds": "longest computing of a rank, seconds",
    "imbalance": "tokens of the busiest expert over the mean",
}
STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --quiet: #6b6b6b; --line: #0072b2;
  --compute: #0072b2; --collective: #e69f00; --wait: #999; }
@media (prefers-color-scheme: dark) { :root { --ink: #eee; --paper: #161616; --quiet: #a5a5a5;
  --line: #56b4e9; --compute: #56b4e9; --wait: #777; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
.curves { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-size: .8rem; color: var(--quiet); }
svg { width: 100%; height: auto; } svg text { font-size: 10px; fill: var(--ink); }
.axis { stroke: var(--quiet); fill: none; } .line { stroke: var(--line); fill: none; stroke-width: 1.5; }
.compute { fill: var(--compute); } .collective { fill: var(--collective); } .wait { fill: var(--wait); }
.key::before { content: ""; display: inline-block; width: .8em; height: .8em; margin: 0 .4em 0 1em; }
.key.compute::before { background: var(--compute); } .key.wait::before { background: var(--wait); }
.key.collective::before { background: var(--collective); }
table { border-collapse: collapse; } th, td { text-align: right; padding: .2rem .8rem .2rem 0; }
th:first-child { text-align: left; } pre { overflow-x: auto; }
"""
KEYS = "".join(
    f'<span class="key {kind}">{kind}</span>' for kind in ("compute", "collective", "wait")
)


def page(
    title: str,
    facts: str,
    steps: Sequence[Mapping[str, Any]],
    events: Sequence[Event],
) -> str:
    """Return a page of HTML.

    Parameters
    ----------
    title, facts
        What was trained, and what the run says at its end, as text.
    steps
        A mapping for each step, as in `metrics.jsonl`.
    events
        What all ranks did in one step.
    """
    numbers = [step["step"] for step in steps]
    when = timeline(events)
    drawn = "".join(
        curve(words, numbers, [step.get(name) for step in steps])
        for name, words in CURVES.items()
        if any(step.get(name) for step in steps)
    )
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<pre>{escape(facts)}</pre>",
        f'<h2>Over the steps</h2><div class="curves">{drawn}</div>' if drawn else "",
        section("Memory of rank 0 after a step", _memory(steps)),
        section("One step in time", f"<p>{KEYS}</p>{when}" if when else ""),
        section("Who waited for whom in that step", _waits(events)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def section(title: str, body: str) -> str:
    """Return a part of the page; nothing if it has no body."""
    return f"<h2>{title}</h2>{body}" if body else ""


def _memory(steps: Sequence[Mapping[str, Any]]) -> str:
    sampled: list[dict[str, int]] = [step["memory"] for step in steps if step.get("memory")]
    held = sampled[-1] if sampled else {}
    return rows(("category", "held"), [(name, format_bytes(size)) for name, size in held.items()])


def _waits(events: Sequence[Event]) -> str:
    found = waits(events)
    ranks = sorted({*found, *(peer for peers in found.values() for peer in peers)})
    if not ranks:
        return ""
    head = ("rank", *(f"for {rank}" for rank in ranks))
    table = []
    for rank in ranks:
        waited = found.get(rank, {})
        cells = [format_seconds(waited[peer]) if peer in waited else "" for peer in ranks]
        table.append((str(rank), *cells))
    return rows(head, table)


def rows(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table; nothing without rows."""
    if not body:
        return ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = []
    for first, *others in body:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        lines.append(f"<tr><th>{escape(first)}</th>{cells}</tr>")
    return f"<table><tr>{top}</tr>{''.join(lines)}</table>"
