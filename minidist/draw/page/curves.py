"""Numbers over steps, as SVG: one line, its range, and the last value in words."""

import math
from collections.abc import Sequence

WIDTH, HEIGHT = 320, 120
LEFT, BELOW = 52, 18  # room for numbers beside the axes


def curve(title: str, steps: Sequence[int], values: Sequence[float | None]) -> str:
    """Return a figure: `values` over `steps`; None where there is none. Nothing without values.

    A step whose number is inf or nan has no place; the words say how many there are.
    """
    known = [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]
    points = [(step, value) for step, value in known if math.isfinite(value)]
    without = len(known) - len(points)
    said = f"at {without} step{'s' * (without > 1)} no finite number" if without else ""
    if not points:
        whole = f"<figure><figcaption>{title}: {said}</figcaption></figure>"
        return whole if known else ""
    low, high = min(value for _, value in points), max(value for _, value in points)
    first, last = known[0][0], known[-1][0]
    across = (WIDTH - LEFT) / max(1, last - first)
    up = (HEIGHT - BELOW - 6) / ((high - low) or 1.0)

    def place(step: int, value: float) -> str:
        x, y = LEFT + (step - first) * across, HEIGHT - BELOW - (value - low) * up
        return f"{x:.1f},{y:.1f}"

    line = " ".join(place(step, value) for step, value in points)
    words = (
        f"{title}: {figure(known[0][1])} after step {first}, {figure(known[-1][1])} after step "
        f"{last}; from {figure(low)} to {figure(high)}{'; ' if said else ''}{said}"
    )
    base = HEIGHT - BELOW
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{words}">'
        f'<path class="axis" d="M{LEFT} 4V{base}H{WIDTH}"/>'
        f'<polyline class="line" points="{line}"/>'
        f'<text x="{LEFT - 4}" y="12" text-anchor="end">{figure(high)}</text>'
        f'<text x="{LEFT - 4}" y="{base}" text-anchor="end">{figure(low)}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 4}">{first}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 4}" text-anchor="end">step {last}</text>'
        f"</svg><figcaption>{words}</figcaption></figure>"
    )


def figure(value: float) -> str:
    """Return a number in at most six characters or so."""
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    if value == 0 or 0.001 <= abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:.1e}"
