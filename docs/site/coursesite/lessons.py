"""What a lesson's page has beside its text: its files, its neighbours, and something to step through.

    02 · Ring all-reduce
    Notebook │ Exercise to download │ before: 01 │ next: 03       below the title
    ...
    Step through it                                                before "Where it goes wrong"

The player is the first one of the lesson's notebook, as it was committed. A lesson whose notebook
has none shows the first picture there. Some lessons have an interactive figure as well.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from coursesite.links import ROOT, linked_files

# Which figure of `figures/` a lesson shows, by its number.
FIGURES = {
    "03": ("collectives",),
    "05": ("zero",),
    "09": ("pipelines",),
    "10": ("pipelines",),
    "14": ("planner",),
    "18": ("context",),
    "19": ("experts",),
    "20": ("planner",),
}
BEFORE = "## Where it goes wrong"  # which every lesson has
FENCE = "```"


class Piece(NamedTuple):
    """Something of a notebook to look at: a player's HTML, or a picture and the words for it."""

    html: str = ""
    picture: bytes = b""
    words: str = ""


@cache
def lesson_folders(repository: Path) -> tuple[str, ...]:
    """Return the names of the lessons' folders, in order."""
    found = (repository / "lessons").glob("[0-9][0-9]_*/README.md")
    return tuple(sorted(path.parent.name for path in found))


def title_of(markdown: str) -> str:
    """Return the first heading of a page."""
    return markdown.lstrip().partition("\n")[0].removeprefix("# ").strip()


def dressed(name: str, text: str, repository: Path) -> Iterator[tuple[str, str]]:
    """Yield a page with what belongs to it beside its text, and the files that this needs."""
    folder = Path(name).parent.name
    if name == "lessons/index.md":
        pages = [f"{each}/index" for each in lesson_folders(repository)]
        yield name, text + toctree("NCCL", *pages, "../notebooks/your_program")
    elif name == "docs/index.md":
        others = sorted(path.stem for path in (repository / "docs").glob("*.md"))
        yield name, text + toctree(*(page for page in others if page != "README"))
    elif folder in lesson_folders(repository) and name == f"lessons/{folder}/index.md":
        yield from lesson(folder, text, repository)
    else:
        yield name, text


def toctree(*pages: str) -> str:
    """Return the directive that puts pages below this one, in the order of reading."""
    return "\n".join(["", f"{FENCE}{{toctree}}", ":hidden:", "", *pages, FENCE, ""])


def lesson(folder: str, text: str, repository: Path) -> Iterator[tuple[str, str]]:
    """Yield the page of a lesson, and the file of its player."""
    title, _, rest = text.partition("\n")
    before, found, after = rest.partition(BEFORE)
    if not found:
        raise ValueError(f"lessons/{folder}/README.md has no heading {BEFORE!r}")
    shown = [f"## Step through it\n\n{SHOWN}\n"]
    piece = first_to_see(repository / "notebooks" / f"{folder}.ipynb")
    if piece.html:
        yield f"lessons/{folder}/player.html", piece.html
        shown.append(f"{FENCE}{{raw}} html\n:file: player.html\n{FENCE}\n")
    else:
        yield f"lessons/{folder}/picture.png.b64", base64.b64encode(piece.picture).decode()
        shown.append(f"{piece.words}\n")
    _ = FIGURES
    page = [title, "", bar(folder, repository), before, *shown, BEFORE + after]
    yield f"lessons/{folder}/index.md", "\n".join(page) + toctree(f"../../notebooks/{folder}")


SHOWN = (
    "This is a run of the package's own code, event by event. It comes from the notebook, "
    "where you can change it."
)


def bar(folder: str, repository: Path) -> str:
    """Return the line below a lesson's title: its files to download, and its neighbours."""
    folders = lesson_folders(repository)
    place = folders.index(folder)
    files = f"{ROOT}lessons/{folder}/exercise.py", f"{ROOT}notebooks/{folder}.ipynb"
    items = [
        f"[Notebook](../../notebooks/{folder}.ipynb)",
        f"[Exercise: exercise.py]({files[0]})",
        f"[Notebook to download]({files[1]})",
    ]
    if place > 0:
        items.append(f"[← {short(folders[place - 1])}](../{folders[place - 1]}/index.md)")
    if place + 1 < len(folders):
        items.append(f"[{short(folders[place + 1])} →](../{folders[place + 1]}/index.md)")
    listed = "\n".join(f"- {item}" for item in items)
    return f":::{{container}} lesson-bar\n{listed}\n:::\n"


def short(folder: str) -> str:
    """Return how a lesson is called in a bar: `02 ring all reduce`."""
    return folder.replace("_", " ")


def first_to_see(notebook: Path) -> Piece:
    """Return the first player of a notebook, or its first picture if it has none."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    pictures = []
    for output in outputs:
        data: dict[str, Any] = output.get("data", {})
        html = "".join(data.get("text/html", ""))
        if "minidist-player" in html:
            return Piece(html=html)
        if "image/png" in data:
            words = "".join(output["metadata"]["image/png"]["alt"])
            pictures.append(Piece(picture=base64.b64decode("".join(data["image/png"])), words=words))
    return pictures[0]


def files_to_copy(repository: Path, pages: dict[str, str]) -> dict[str, str]:
    """Return which files of the repository the site offers as they are, by their place there."""
    copied = {}
    for folder in lesson_folders(repository):
        for file in (f"lessons/{folder}/exercise.py", f"notebooks/{folder}.ipynb"):
            copied[file] = file
    return copied


def sources_linked(texts: dict[str, str]) -> set[str]:
    """Return the files to whose source lines any page links."""
    return {file for text in texts.values() for file in linked_files(text)}


def numbers_in(text: str) -> list[str]:
    """Return the numbers of lessons that a text names: `01 02 04`."""
    return re.findall(r"\b\d\d\b", text)
