"""What a lesson's page has beside its text: its files, its neighbours, and something to step through.

    02 · Ring all-reduce
    Notebook │ Exercise to download │ ← 01 · Ranks │ 03 · Trees →  below the title
    ...
    Step through it                                               before "Where it goes wrong"

The player is the first one of the lesson's notebook, as it was committed, with the words that stand
before it there. A notebook that opens with a picture shows that as well, and some lessons have an
interactive figure.
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
PICTURE = "The notebook opens with this picture:"
BEFORE_WORDS = re.compile(r"</details>|^#+ .*$", re.M)  # a title, or the answer to a question


class Player(NamedTuple):
    """A player's HTML, and the words that a notebook has before it."""

    html: str
    words: str


class Picture(NamedTuple):
    """A picture, and the words for it."""

    data: bytes
    words: str


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
    notebook = repository / "notebooks" / f"{folder}.ipynb"
    words = first_player(notebook).words
    shown = f"## Step through it\n\n{words}\n\n{PLAYER}\n\n```{{player}} {folder}\n```\n"
    if picture := opening_picture(notebook):
        yield f"lessons/{folder}/picture.png", picture.data
        shown += f"\n{PICTURE}\n\n```{{image}} picture.png\n:alt: {picture.words}\n```\n"
    if folder[:2] in FIGURES:
        shown += f"\n```{{interactive}} {FIGURES[folder[:2]]}\n```\n"
    page = [title, "", bar(folder, repository), before, shown, BEFORE + after]
    below = f"Notebook {folder[:2]} <../../notebooks/{folder}>"
    yield f"lessons/{folder}/index.md", "\n".join(page) + toctree(below)


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
        before = folders[place - 1]
        items.append(f"[← {title_of(before, repository)}](../{before}/index.md)")
    if place + 1 < len(folders):
        after = folders[place + 1]
        items.append(f"[{title_of(after, repository)} →](../{after}/index.md)")
    listed = "\n".join(f"- {item}" for item in items)
    return f":::{{container}} lesson-bar\n{listed}\n:::\n"


def title_of(folder: str, repository: Path) -> str:
    """Return the title of a lesson: `02 · Ring all-reduce`."""
    text = (repository / "lessons" / folder / "README.md").read_text(encoding="utf-8")
    return text.partition("\n")[0].removeprefix("# ")


def cells_of(notebook: Path) -> list[dict[str, Any]]:
    """Return the cells of a notebook."""
    cells: list[dict[str, Any]] = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return cells


def first_player(notebook: Path) -> Player:
    """Return the first player of a notebook, and the words before it.

    Raises
    ------
    ValueError
        If it has none.
    """
    words = ""
    for cell in cells_of(notebook):
        if cell["cell_type"] == "markdown":
            words = BEFORE_WORDS.split("".join(cell["source"]))[-1].strip()
        elif html := player_in(cell):
            return Player(html, words)
    raise ValueError(
        f"{notebook} has no player, so its lesson has nothing to step through: add a cell with "
        "show(record(...)) to its source"
    )


def player_in(cell: dict[str, Any]) -> str:
    """Return the HTML of a player that a cell has shown, or nothing."""
    for output in cell["outputs"]:
        html = "".join(output.get("data", {}).get("text/html", ""))
        if "minidist-player" in html:
            return html
    return ""


def opening_picture(notebook: Path) -> Picture | None:
    """Return the picture with which a notebook opens, unless it opens with a player."""
    first = next(cell for cell in cells_of(notebook) if cell["cell_type"] == "code")
    if player_in(first):
        return None
    for output in first["outputs"]:
        data = output.get("data", {})
        if "image/png" in data:
            words = "".join(output["metadata"]["image/png"]["alt"])
            return Picture(base64.b64decode("".join(data["image/png"])), " ".join(words.split()))
    return None


def words_of_pictures(notebook: Path) -> list[str]:
    """Return what a notebook says in words of each of its pictures, in their order."""
    found = []
    for output in (output for cell in cells_of(notebook) for output in cell.get("outputs", ())):
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
