"""Each page's description, which search engines and shared links show, and notebooks' pictures: their
alt texts, and key frames folded away where the player stands below them.
"""

from __future__ import annotations

from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from coursesite.lessons import words_of_pictures

LONGEST = 160  # letters of a description
FOLD = """<details class="key-frames"><summary>Key frames of this run, as a picture</summary>
<div tabindex="0" role="group" aria-label="key frames">"""


def describe(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Add the description of a page to its head."""
    title = context.get("title", "")
    words = description(doctree) if doctree else f"{title or page} of minidist, a course."
    context["metatags"] = f'<meta name="description" content="{escape(words)}">\n' + (
        context.get("metatags") or ""
    )


def description(doctree: nodes.document) -> str:
    """Return the first paragraphs of a page, up to some length."""
    words = ""
    for paragraph in doctree.findall(nodes.paragraph):
        words = f"{words} {' '.join(paragraph.astext().split())}".strip()
        if len(words) > 60:
            break
    return words if len(words) <= LONGEST else words[:LONGEST].rpartition(" ")[0] + " …"


def add_alt_texts(doctree: nodes.document, notebook: Path) -> None:
    """Give each picture of a notebook the words that the notebook has for it.

    Raises
    ------
    ValueError
        If there are not as many pictures as words.
    """
    pictures = [
        image
        for bundle in doctree.findall(nodes.container)
        if bundle.get("nb_element") == "mime_bundle"
        for image in bundle.findall(nodes.image)
    ]
    for image, words in zip(pictures, words_of_pictures(notebook), strict=True):
        image["alt"] = words


def fold_key_frames(doctree: nodes.document) -> None:
    """Fold the key frames of each run that has a player: they are for places without scripts, and to
    be read they have to be larger than the page.
    """
    bundles = [
        node for node in doctree.findall(nodes.container) if node.get("nb_element") == "mime_bundle"
    ]
    for frames, shown in pairwise(bundles):
        around = shown.parent
        has_player = any("minidist-player" in raw.astext() for raw in shown.findall(nodes.raw))
        if has_player and frames.parent is around and any(frames.findall(nodes.image)):
            place = around.index(frames)
            around.insert(place, nodes.raw("", FOLD, format="html"))
            around.insert(place + 2, nodes.raw("", "</div></details>", format="html"))
