"""What a lesson's page has beside its text: its files, its neighbours, and something to step through.

    02 · Ring all-reduce
    Notebook │ Exercise to download │ before: 01 │ next: 03       below the title
    ...
    Step through it                                               before "Where it goes wrong"

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

from coursesite.links import ROOT

# Which figure of `figures/` a lesson shows, by its number.
FIGURES = {
    "03": "collectives",
    "05": "zero",
    "06": "zero",
    "09": "pipelines",
    "10": "pipelines",
    "14": "planner",
    "18": "context",
    "19": "experts",
    "20": "planner",
}
BEFORE = "## Where it goes wrong"  # which every lesson has
PLAYER = (
    "This is a run of the package's own code, event by event. It comes from the notebook, "
    "where you can change it."
)
PICTURE = "A picture from the notebook, of a run of the package's own code; change it there."


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


def toctree(*pages: str) -> str:
    """Return the directive that puts pages below this one, in the order of reading."""
    return "\n".join(["", "```{toctree}", ":hidden:", "", *pages, "```", ""])


def lesson(folder: str, text: str, repository: Path) -> Iterator[tuple[str, str | bytes]]:
    """Yield the page of a lesson, and the file of its picture if it has one.

    Raises
    ------
    ValueError
        If the lesson has no place for what is to be stepped through.
    """
    title, _, rest = text.partition("\n")
    before, found, after = rest.partition(BEFORE)
    if not found:
        raise ValueError(f"lessons/{folder}/README.md has no heading {BEFORE!r}: it is put there")
    piece = first_to_see(repository / "notebooks" / f"{folder}.ipynb")
    if piece.html:
        shown = f"## Step through it\n\n{PLAYER}\n\n```{{player}} {folder}\n```\n"
    else:
        yield f"lessons/{folder}/picture.png", piece.picture
        words = " ".join(piece.words.split())
        shown = f"## Look at it\n\n{PICTURE}\n\n```{{image}} picture.png\n:alt: {words}\n```\n"
    if folder[:2] in FIGURES:
        shown += f"\n```{{interactive}} {FIGURES[folder[:2]]}\n```\n"
    page = [title, "", bar(folder, repository), before, shown, BEFORE + after]
    notebook = f"Notebook {folder[:2]} <../../notebooks/{folder}>"
    yield f"lessons/{folder}/index.md", "\n".join(page) + toctree(notebook)


def bar(folder: str, repository: Path) -> str:
    """Return the line below a lesson's title: its files to download, and its neighbours."""
    folders = lesson_folders(repository)
    place = folders.index(folder)
    items = [
        f"[Notebook](../../notebooks/{folder}.ipynb)",
        f"[Exercise to download]({ROOT}lessons/{folder}/exercise.py)",
        f"[Notebook to download]({ROOT}notebooks/{folder}.ipynb)",
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
            drawn = base64.b64decode("".join(data["image/png"]))
            pictures.append(Piece(picture=drawn, words=words))
    return pictures[0]


def words_of_pictures(notebook: Path) -> list[str]:
    """Return what a notebook says in words of each of its pictures, in their order."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    found = []
    for output in (output for cell in cells for output in cell.get("outputs", ())):
        for kind in {"image/png", "image/svg+xml"} & set(output.get("data", {})):
            found.append(" ".join("".join(output["metadata"][kind]["alt"]).split()))
    return found


def offered_files(repository: Path) -> list[str]:
    """Return the files that the site offers as they are, from the root of either."""
    folders = lesson_folders(repository)
    exercises = [f"lessons/{folder}/exercise.py" for folder in folders]
    notebooks = sorted(path.name for path in (repository / "notebooks").glob("*.ipynb"))
    return exercises + [f"notebooks/{name}" for name in notebooks]


def programs_page(folder: str) -> str:
    """Return where the site has all programs of a lesson's text as one file."""
    return f"lessons/{folder}/printed.py"


def programs_of(folder: str, repository: Path) -> str:
    """Return the programs of a lesson's text, in order: the later ones use names of the earlier."""
    text = (repository / "lessons" / folder / "README.md").read_text(encoding="utf-8")
    head = (
        f'"""The programs of the text of lesson {folder[:2]}, in order; they print its numbers."""'
    )
    return "\n\n".join([head, *re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)])
