"""Where the paths lead on from a lesson: a line below its text and below its notebook for each path.

    Paths
    A weekend, stop 2 of 7: next 04 · Data parallelism
    I only want FSDP, stop 2 of 8: next 03 · Trees and meshes

Whoever comes from the page of a path sees only that path's line, below the title as well, and the
page's own "Next" and "Previous" follow it: `static/paths.js` does that, with the path's name behind
each address, as `index.html?path=weekend`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from docutils import nodes

from coursesite.links import ROOT
from coursesite.paths import PATH, ROW, lessons_of

COURSE = "lessons/README.md"  # which says what the paths are
PAGES = "docs/site/pages"


class Lesson(NamedTuple):
    """A lesson as a path names it."""

    number: str
    title: str
    folder: str


class Route(NamedTuple):
    """A path: its name, its page from the root of the site, and its lessons in order."""

    name: str
    page: str
    lessons: tuple[Lesson, ...]


@cache
def routes(repository: Path) -> tuple[Route, ...]:
    """Return the paths that have a page."""
    course = (repository / COURSE).read_text(encoding="utf-8")
    known = {
        number: Lesson(number, title, folder) for number, title, folder, *_ in ROW.findall(course)
    }
    found = []
    for page in sorted((repository / PAGES).glob("*.md")):
        for name in PATH.findall(page.read_text(encoding="utf-8")):
            lessons = tuple(known[number] for number in lessons_of(name, course))
            found.append(Route(name, page.stem, lessons))
    return tuple(sorted(found, key=lambda route: len(route.lessons)))


def stops(folder: str, repository: Path) -> nodes.container | None:
    """Return the lines about the paths that go through a lesson, or None if none does."""
    listed = nodes.bullet_list()
    for route in routes(repository):
        for place, lesson in enumerate(route.lessons):
            if lesson.folder == folder:
                line = nodes.paragraph("", "", *words_of(route, place))
                listed += nodes.list_item("", line)
    if not listed.children:
        return None
    title = nodes.paragraph("", "Paths", classes=["paths-title"])
    return nodes.container("", title, listed, classes=["path-stops"])


def words_of(route: Route, place: int) -> Iterator[nodes.Node]:
    """Yield what the line of a path says at one of its stops."""
    yield link(route.name, f"{route.page}.html", "path")
    yield nodes.Text(f", stop {place + 1} of {len(route.lessons)}")
    if place + 1 < len(route.lessons):
        yield nodes.Text(": next ")
        yield to_lesson(route.lessons[place + 1], "onwards")
    else:
        yield nodes.Text(": the last one")
    if place:
        yield nodes.Text("; before ")
        yield to_lesson(route.lessons[place - 1], "backwards")


def to_lesson(lesson: Lesson, kind: str) -> nodes.reference:
    """Return a link to a lesson."""
    return link(f"{lesson.number} · {lesson.title}", f"lessons/{lesson.folder}/index.html", kind)


def link(words: str, address: str, kind: str) -> nodes.reference:
    """Return a link to a page named from the root of the site."""
    return nodes.reference("", words, refuri=f"{ROOT}{address}", internal=True, classes=[kind])
