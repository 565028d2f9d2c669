"""The course's front page: every lesson and notebook is on it, in order, and every link leads
somewhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LESSONS = ROOT / "lessons"
MAP = LESSONS / "README.md"
FOLDERS = sorted(path.name for path in LESSONS.glob("[0-9][0-9]_*") if path.is_dir())
ROW = re.compile(
    r"^\| \[(\d\d) · [^]]+\]\((\d\d_\w+)/README\.md\) \| \[\1\]\(\.\./notebooks/(\w+)\.ipynb\) \|",
    re.M,
)
PAGES = sorted([*LESSONS.glob("*.md"), *LESSONS.glob("[0-9][0-9]_*/README.md")])
LINK = re.compile(r"(?<!!)\[[^]\n]+\]\(([^)#\s]+)(?:#[^)]*)?\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.M | re.S)


def rows() -> list[tuple[str, str, str]]:
    """Return the number, the folder and the notebook of each row of the table."""
    return ROW.findall(MAP.read_text(encoding="utf-8"))


def test_every_lesson_is_in_the_table() -> None:
    assert [folder for _, folder, _ in rows()] == FOLDERS
    assert [number for number, _, _ in rows()] == [f"{n:02}" for n in range(1, len(FOLDERS) + 1)]


def test_every_notebook_is_in_the_table() -> None:
    notebooks = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    of_lessons = [name for name in notebooks if name[:2].isdigit()]
    assert [notebook for _, _, notebook in rows()] == of_lessons
    for other in set(notebooks) - set(of_lessons):  # it belongs to no lesson
        assert f"](../notebooks/{other}.ipynb)" in MAP.read_text(encoding="utf-8")
    assert all(
        folder == notebook and folder.startswith(number) for number, folder, notebook in rows()
    )


def test_every_lesson_is_in_the_drawing_and_in_the_semester() -> None:
    text = MAP.read_text(encoding="utf-8")
    drawing = text.partition("## What needs what\n\n```\n")[2].partition("```")[0]
    week_by_week = re.search(r"^\| lesson \|(?: \d\d)(.*)$", text, re.M)
    numbers = {f"{n:02}" for n in range(1, len(FOLDERS) + 1)}
    assert set(re.findall(r"\b(\d\d) [a-z]", drawing)) == numbers
    assert week_by_week and set(re.findall(r"\d\d", week_by_week[0])) == numbers


NUMBERS = ("", "one", "two", "three", "four", "five", "six")


def test_the_hours_on_the_map_are_those_that_the_lessons_say() -> None:
    for folder, hours in re.findall(
        r"^\| \[[^]]+\]\((\d\d_\w+)/README\.md\) \| \S+ \| (\S+) \|", MAP.read_text(), re.M
    ):
        said = " to ".join(NUMBERS[int(number)] for number in hours.split("-"))
        text = " ".join((LESSONS / folder / "README.md").read_text(encoding="utf-8").split())
        assert f"*Time:* {said} hours with the exercise" in text, f"{folder}: the map says {hours}"


def test_the_weekend_has_its_own_prerequisites() -> None:
    """All lessons that a lesson of this path names as coming before it, but for one of which it
    says what is needed.
    """
    weekend = re.search(r"\*\*A weekend\*\*.*?\.\n\n", MAP.read_text(encoding="utf-8"), re.S)
    assert weekend
    taken = set(re.findall(r"\b\d\d\b", weekend[0].partition(", with the exercises")[0]))
    assert len(taken) >= 5
    for number in taken:
        text = next(LESSONS.glob(f"{number}_*/README.md")).read_text(encoding="utf-8")
        before = re.search(r"\*Before this:\* ([^*]*)\*Time", text)
        assert before
        needed = set(re.findall(r"\b\d\d\b", before[1].partition("; of lesson")[0]))
        assert needed <= taken, f"lesson {number} needs {sorted(needed - taken)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(LESSONS)))
def test_links_lead_somewhere(page: Path) -> None:
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    links = [link for link in LINK.findall(text) if not link.startswith(("http://", "https://"))]
    missing = [link for link in links if not (page.parent / link).resolve().exists()]
    assert not missing, f"{page.name} links to {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(LESSONS)))
def test_files_of_the_package_that_a_page_names_are_there(page: Path) -> None:
    named = set(
        re.findall(
            r"`((?:minidist|lessons|tests|notebooks)/[\w/]+\.(?:py|md|sbatch|ipynb))`",
            page.read_text(),
        )
    )
    missing = sorted(name for name in named if not (ROOT / name).is_file())
    assert not missing, f"{page.name} tells the reader to open {missing}"


def test_commands_of_the_front_page_exist() -> None:
    """What the page has readers type are commands and options that there are."""
    from minidist.__main__ import COMMANDS
    from minidist.course.grade import _parser

    text = MAP.read_text(encoding="utf-8")
    assert set(re.findall(r"python -m minidist (\w+)", text)) <= set(COMMANDS)
    known = {option for action in _parser()._actions for option in action.option_strings}
    for line in re.findall(r"minidist grade [^\n#`]*", text):
        assert set(re.findall(r"--[a-z]+", line)) <= known, line
