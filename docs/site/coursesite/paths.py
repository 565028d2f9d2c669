"""The paths through the course, as `lessons/README.md` says them: each becomes a page that leads on.

<!-- path: A weekend -->    the words of that path, and a table of its lessons in order
<!-- map -->                the drawing of what needs what, whose lessons are links
"""

from __future__ import annotations

import re
from pathlib import Path

ROW = re.compile(
    r"^\| \[(\d\d) · ([^]]+)\]\((\d\d_\w+)/README\.md\) \| \S+ \| (\S+) \| (.*) \|$", re.M
)
PATH = re.compile(r"<!-- path: (.+?) -->")
HEAD = "| {} | lesson | notebook | hours | afterwards you can |\n|---|---|---|---|---|"
WEEKS = re.compile(r"^\| week \|(.*)\|\n.*\n\| lesson \|(.*)\|$", re.M)


def with_paths(text: str, repository: Path) -> str:
    """Return a page with its paths filled in."""
    course = (repository / "lessons/README.md").read_text(encoding="utf-8")
    return PATH.sub(lambda found: path(found[1], course), text)


def path(name: str, course: str) -> str:
    """Return the words of a path and the table of its lessons."""
    words = words_about(name, course)
    rows = {number: row for number, *row in ROW.findall(course)}
    numbers, weeks = lessons_in(words), weeks_in(words)
    table = [HEAD.format("week" if weeks else "")]
    for place, number in enumerate(numbers, start=1):
        title, folder, hours, able = rows[number]
        when = weeks.get(number, place)
        lesson = f"[{number} · {title}](lessons/{folder}/index.md)"
        notebook = f"[{number}](notebooks/{folder}.ipynb)"
        table.append(f"| {when} | {lesson} | {notebook} | {hours} | {able} |")
    first = rows[numbers[0]]
    onwards = f"[Begin with {numbers[0]} · {first[0]} →](lessons/{first[1]}/index.md)"
    return "\n".join([words, "", ":::{container} path-table", *table, "", onwards, ":::"])


def words_about(name: str, course: str) -> str:
    """Return what the course says of a path.

    Raises
    ------
    ValueError
        If the course names no such path.
    """
    found = re.search(rf'^\*\*"?{re.escape(name)}"?\*\*.*?(?=^\*\*|^## )', course, re.M | re.S)
    if not found:
        raise ValueError(f"lessons/README.md has no path {name!r}")
    return found[0].strip()


def lessons_of(name: str, course: str) -> list[str]:
    """Return the numbers of a path's lessons, in the order in which it leads through them."""
    return lessons_in(words_about(name, course))


def lessons_in(words: str) -> list[str]:
    """Return the numbers of the lessons that a path names, each once: in the order of its weeks if
    it has a table of them, else in the course's.
    """
    if weeks := weeks_in(words):
        return list(weeks)
    said = words.partition(", with the exercises")[0]
    return sorted(set(re.findall(r"\b\d\d\b", said)))


def weeks_in(words: str) -> dict[str, str]:
    """Return the week of each lesson, in their order, if a path has a table of weeks."""
    found = dict[str, str]()
    for table in WEEKS.finditer(words):
        for week, numbers in zip(table[1].split("|"), table[2].split("|"), strict=True):
            found |= dict.fromkeys(re.findall(r"\d\d", numbers), week.strip())
    return found


def drawing_of(repository: Path) -> str:
    """Return the drawing of what needs what."""
    course = (repository / "lessons/README.md").read_text(encoding="utf-8")
    return course.partition("## What needs what\n\n```\n")[2].partition("```")[0]
