"""What a page of the site is asked in a browser: players, figures, contrast, room."""

from __future__ import annotations

import time
from pathlib import Path

from browser import Page

# The texts whose contrast with what is behind them is too low: WCAG 2.2, 1.4.3, level AA.
PALE = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (share) => share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const ground = rgba(getComputedStyle(node).backgroundColor);
      if (ground[3] > 250) return ground;
    }
    return rgba(getComputedStyle(document.documentElement).colorScheme.includes("dark") ? "black" : "white");
  };
  const found = new Set();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement, style = getComputedStyle(node);
    const seen = node.checkVisibility({visibilityProperty: true, opacityProperty: true});
    if (!seen || !walk.currentNode.textContent.trim()) continue;
    if (["SCRIPT", "STYLE", "NOSCRIPT", "OPTION"].includes(node.tagName) || node.closest("svg")) continue;
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
    const [a, b] = [light(rgba(style.color)), light(behind(node))].sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05), text = walk.currentNode.textContent.trim();
    if (contrast < (large ? 3 : 4.5))
      found.add(`${contrast.toFixed(2)} ${node.tagName}.${node.className}: ${text.slice(0, 30)}`);
  }
  return [...found];
})()
"""
PLAYERS = "document.querySelectorAll('.minidist-player')"


def check_page(page: Page, file: Path, query: str = "") -> int:
    """Open a page; return how many players it has, each of which the keyboard has led to its end.

    It logs no error, loads nothing from outside the site's folder, and does not scroll sideways.
    """
    page.visit(file.as_uri() + query)
    count = int(page.run(f"{PLAYERS}.length"))
    for number in range(count):
        step_to_the_end(page, number)
    wide = page.run("document.scrollingElement.scrollWidth - innerWidth")
    assert wide <= 0, f"{file} is {wide} pixels wider than the window"
    assert page.errors == [], file
    return count


def step_to_the_end(page: Page, number: int) -> None:
    """Step through a player with the arrow key. The others stay where they are."""
    this, places = (
        f"{PLAYERS}[{number}]",
        f"[...{PLAYERS}].map(p => p.querySelector('input').value)",
    )
    unfold = "for (let node = it; node; node = node.parentElement) node.open = true;"
    page.run(f"(it => {{ {unfold} it.focus(); }})({this})")  # an answer may be folded
    page.press("Home")
    before = page.run(places)
    last = int(page.run(f"{this}.querySelector('input').max"))
    page.press("ArrowRight", last)
    after = page.run(places)
    assert after == [str(last) if at == number else old for at, old in enumerate(before)]
    shown = page.run(f"{this}.querySelector('.count').textContent")
    assert shown == f"{last} of {last}"


def pale(page: Page, scheme: str) -> list[str]:
    """Return the texts of the page that is open which are too pale to be read, in light or dark."""
    page.prefer(scheme)
    return list(page.run(PALE))


def wait_for(page: Page, script: str) -> None:
    """Wait until a script says something that is true."""
    limit = time.monotonic() + 60
    while not page.run(script):
        assert time.monotonic() < limit, script
        time.sleep(0.05)
