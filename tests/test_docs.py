"""What README and docs/ say is so: blocks run, tables are those of the package, files and commands
exist.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ranks import mpirun
from training import PROGRAM

from minidist.__main__ import COMMANDS
from minidist.bench.options import NAMES, ON_GPUS
from minidist.full.trainer.flags import build_parser
from minidist.further import Config
from minidist.threads import DeadlockError

ROOT = Path(__file__).parents[1]
RING = ROOT / "minidist" / "ring.py"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EACH = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
COUNTED = re.compile(r"\d[\d.]* (?:B|KiB|MiB)\b")


@pytest.mark.parametrize("page", ("README.md", "lessons/README.md"))
def test_the_environment_is_activated_before_the_first_command(page: str) -> None:
    """`make demo` and `make setup` leave the shell with another Python."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
    blocks = "\n".join(block for language, block in found if not language)
    installed, _, commands = blocks.partition("source .venv/bin/activate")
    assert re.search(r"^make (demo|setup) ", installed, re.M) and "minidist" not in installed
    assert "python -m minidist" in commands


def test_the_readme_is_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110


@cache
def load_tables() -> Any:
    """Return `docs/tables.py`, which no package has."""
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None and spec.loader is not None
    tables = sys.modules["tables"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    return tables


@EACH
def test_tables_are_those_of_the_package(page: Path) -> None:
    tables = load_tables()
    assert tables.with_tables(page.read_text()) == page.read_text(), (
        "python docs/tables.py writes them anew"
    )


def test_pages_and_lessons_name_no_file_that_is_gone() -> None:
    file = re.compile(r"(?<![\w/])(?:minidist|tests|docs|lessons)/[\w/.]+\.\w+")
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("lessons/**/*.md")]
    named = {name for page in pages for name in file.findall(page.read_text())}
    assert len(named) > 50 and [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_heads_of_docstrings_stand_alone() -> None:
    """A paragraph on the line that underlines its head is no section to a reader, nor to a tool."""
    files = [file for folder in ("minidist", "lessons") for file in (ROOT / folder).rglob("*.py")]
    joined = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in files
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.match(r" *-{4,} \S", line)
    ]
    assert joined == []


@EACH
def test_files_and_commands_exist(page: Path) -> None:
    text = page.read_text()
    named = [
        name
        for cell in re.findall(r"^\| \d+ \| (.*?) \|", text, re.M)
        for name in re.findall(r"`([^`]+)`", cell)
    ]
    folder = ROOT / "minidist"
    for name in named:  # a name without a folder lies beside the one before
        path = (
            ROOT / "minidist" / name
            if "/" in name or not (folder / name).exists()
            else folder / name
        )
        assert path.exists(), name
        folder = path.parent
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert set(re.findall(r"python -m minidist (\w+)", text)) <= COMMANDS.keys()
    assert {name.replace("-", "_") for name in re.findall(r"`bench ([a-z-]+)`", text)} <= {
        *NAMES,
        *ON_GPUS,
    }


def test_every_page_stands_in_the_index() -> None:
    index, readme = (ROOT / "docs" / "README.md").read_text(), (ROOT / "README.md").read_text()
    assert [
        page.name
        for page in PAGES[1:]
        if page.name != "README.md" and f"({page.name})" not in index
    ] == []
    assert "(docs/README.md)" in readme and "SLURM" in readme and "Gradescope" in readme


def test_every_flag_that_a_page_names_is_one_of_train() -> None:
    """And those that say how a run reads, measures and prints are explained."""
    page = (ROOT / "docs" / "training.md").read_text()
    flags = {action.option_strings[0] for action in build_parser("x", Config)._actions}
    assert set(re.findall(r"--[a-z][a-z-]+", page)) <= {*flags, "--to"}  # which is one of export
    told = (
        "--text --text-field --eval-text --eval-every --eval-batches --held-out --log-every "
        "--lr-schedule --cooldown"
    )
    assert all(f"`{flag}`" in page or f"`{flag} " in page for flag in told.split())


def test_the_words_about_zero_3_are_what_is_sent() -> None:
    """Three halves of an all-reduce beside two."""
    page = (ROOT / "docs" / "memory.md").read_text()
    ours, theirs = map(
        float, re.findall(r"3 \(P - 1\)/P, or ([\d.]+) MiB beside\n([\d.]+) MiB here", page)[0]
    )
    assert ours / theirs == pytest.approx(1.5, rel=0.02)
    assert all(
        f"{stage} " in page and f"{ours} MiB" in page for stage in ("DDP", "ZeRO-1", "ZeRO-3")
    )


def test_the_blocks_of_the_readme_run(capsys: pytest.CaptureFixture[str]) -> None:
    text, space = (ROOT / "README.md").read_text(), {"__name__": "readme"}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
        exec(block, space)
    assert capsys.readouterr().out.count("array([60, 64, 68])") == 4
    shown = re.search(r"^for step in range\(1.*?\n(?=^```$)", text, re.M | re.S)
    ring = "\n".join(line.partition("  #")[0].strip() for line in RING.read_text().splitlines())
    assert shown is not None
    assert "\n".join(line.partition("  #")[0].strip() for line in shown[0].splitlines()) in ring
    statement, *printed = re.findall(r"^>>> (.*?)\n(.*?)^```$", text, re.M | re.S)[0]
    with pytest.raises(DeadlockError) as error:
        exec(compile(statement, "<stdin>", "exec"), space)
    assert f"DeadlockError: {error.value}\n".replace("<module>", "<lambda>") == printed[0]


@pytest.mark.soak
@pytest.mark.parametrize("command", ("stages", "layouts"))
def test_the_bytes_of_the_tables_are_what_the_commands_count(command: str) -> None:
    blocks = re.findall(r"^```\n(.*?)^```$", (ROOT / "docs" / "memory.md").read_text(), re.M | re.S)
    said = blocks[("stages", "layouts").index(command)]
    axes = ["--dp", "4"] if command == "stages" else []
    outcome = mpirun(
        4, PROGRAM, command, "--config", str(ROOT / "demo.toml"), *axes, "--steps", "2", timeout=600
    )
    found = [line for line in outcome.stdout.splitlines() if COUNTED.search(line)]
    assert [COUNTED.findall(line) for line in found] == [
        COUNTED.findall(line) for line in said.splitlines() if COUNTED.search(line)
    ], outcome.stdout + outcome.stderr


def test_the_table_of_what_fits() -> None:
    tables = load_tables()
    header, rule, first, second, *others = tables.markdown_table().splitlines()
    assert len(others) + 2 == len(tables.USUAL)
    assert {line.count("|") for line in (header, rule, first, second, *others)} == {14}
    assert first == (
        "| llama-7b | 8 | dp=8 zero=0 | none | 13.5 | 27.0 | 80.9 | 17.4 | 0.0 | 0.7 | 8.2 | 147.6 "
        "| **no** |"
    )
    assert second.endswith("| 76.8 | yes |")
    assert "yes" in tables.markdown_table(tables.USUAL[:1], capacity=200e9)
