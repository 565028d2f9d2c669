"""The page that runs the package: how it is built, how it behaves, and what Python says in it.

What needs Pyodide is skipped unless MINIDIST_PYODIDE names a folder that holds the release's
`pyodide.js`, `pyodide.asm.js`, `pyodide.asm.wasm`, `python_stdlib.zip`, `pyodide-lock.json`, and its
wheel of numpy. Such a copy comes from npm's package `pyodide` and the release's files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browser import BROWSERS, Page, begin

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "docs/run_here"
sys.path[:0] = [str(SOURCES), str(ROOT / "tests/comm")]

import build as page_builder  # noqa: E402
import cooperative_cases  # noqa: E402

PYODIDE = os.environ.get("MINIDIST_PYODIDE", "")
WITH_PYODIDE = pytest.mark.skipif(
    not PYODIDE, reason="no copy of Pyodide at hand: MINIDIST_PYODIDE=FOLDER names one"
)
PATIENCE = 300.0  # seconds: a busy machine takes its time
pytestmark = pytest.mark.timeout(2 * PATIENCE)
RING = (SOURCES / "programs/ring.py").read_text()
PRINTS_DIGESTS = """
import hashlib, json, pathlib, sys
pathlib.Path("cooperative_cases.py").write_text({source!r})
sys.path.insert(0, ".")
from cooperative_cases import CASES
for case in CASES:
    found = json.dumps(case("browser"))
    print(case.__name__, hashlib.sha256(found.encode()).hexdigest())
"""
ASKS_IN_VAIN = """
import minidist
for how in ({"engine": "threads"}, {"engine": "cooperative"}):
    try:
        minidist.run(print, 2, **how)
    except ValueError as error:
        print(error)
import threading
try:
    import torch
except ImportError as error:
    print(error)
threading.Thread(target=print).start()
"""
DEEP = """
import minidist
print(minidist.run(lambda comm: comm.all_gather_object(comm.rank)[-1], 1024)[0])
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *words: object) -> None:
        pass


class Desk:
    """The page in a browser, and how a reader presses its buttons."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        page.inside = url
        page.visit(url + "run.html")

    def set(self, part: str, field: str, value: str) -> None:
        self.page.run(
            f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('change')); }})"
            f"(document.querySelector('[data-part={part}] [data-field={field}]'))"
        )

    def write(self, part: str, text: str) -> None:
        place = f"document.querySelector('[data-part={part}] textarea')"
        self.page.run(f"{place}.value = {json.dumps(text)}")

    def press(self, part: str, button: str) -> None:
        self.page.run(f"document.querySelector('[data-part={part}] [data-do={button}]').click()")

    def go(self, part: str, button: str, told: str = "") -> str:
        """Press a button, wait, and return what the page shows. The browser's console may have told
        `told`, but nothing else.
        """
        self.press(part, button)
        self.wait("!document.querySelector('.run-here').dataset.busy")
        assert [each for each in self.page.errors if not told or told not in each] == []
        return self.page.text(f"[data-part={part}] [data-answer]")

    def wait(self, script: str) -> Any:
        limit = time.monotonic() + PATIENCE
        while not (found := self.page.run(script)):
            assert time.monotonic() < limit, (script, self.page.text(".status"), self.page.errors)
            time.sleep(0.05)
        return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    page_builder.build(folder, Path(PYODIDE) if PYODIDE else None)
    return folder


@pytest.fixture(scope="module", params=BROWSERS)
def desk(
    request: pytest.FixtureRequest, site: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Desk]:
    page = begin(request.param, tmp_path_factory.mktemp("profile"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Desk(page, f"http://127.0.0.1:{server.server_port}/")
    page.close()
    server.shutdown()
    server.server_close()


def asked(*questions: tuple[str, dict[str, Any]]) -> list[Any]:
    """Return what `in_page.py` answers in a Python of this machine, to which torch is hidden."""
    program = (
        "import sys, json; sys.modules['torch'] = None; sys.path[:0] = sys.argv[1:3]; "
        "import in_page; [print('ANSWER', in_page.answer(each)) for each in sys.argv[3:]]"
    )
    words = [json.dumps({"do": do, "with": how}) for do, how in questions]
    done = subprocess.run(
        [sys.executable, "-c", program, str(SOURCES), str(ROOT), *words],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tempfile.gettempdir(),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return [json.loads(line[7:]) for line in lines if line.startswith("ANSWER ")]


# ---------------------------------------------------------------- how it is built


def test_the_archive_is_the_working_tree_and_imports_with_numpy_alone(tmp_path: Path) -> None:
    contents = page_builder.archive()
    assert contents == page_builder.archive(), "the same bytes of the same files"
    (tmp_path / "minidist.zip").write_bytes(contents)
    with zipfile.ZipFile(tmp_path / "minidist.zip") as archive:
        names = archive.namelist()
        assert (
            archive.read("minidist/full/mesh.py") == (ROOT / "minidist/full/mesh.py").read_bytes()
        )
        archive.extractall(tmp_path)
    assert not [
        name for name in names if "solution" in name or "honest" in name or "mistake" in name
    ]
    kinds = {Path(name).suffix for name in names}
    assert kinds == {".py", ".toml", ".html", ".svg", ".json"}
    absent = "import sys; sys.modules.update(torch=None, mpi4py=None, matplotlib=None); "
    words = [sys.executable, "-c", absent + "import in_page; print(*in_page.DO)"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout.split() == ["run", "grade", "write_schedule", "schedule", "plan"], (
        done.stderr
    )


def test_a_page_without_a_folder_loads_from_the_network_only_pyodide(tmp_path: Path) -> None:
    page_builder.build(tmp_path)
    text = (tmp_path / "run.html").read_text() + (tmp_path / "run/run.js").read_text()
    text += (tmp_path / "run/worker.js").read_text() + (tmp_path / "run/run.css").read_text()
    addresses = set(re.findall(r"https?://[^\s\"'<>]+", text))
    assert addresses == {page_builder.CDN, "http://localhost:8000/run.html"}
    assert "17 MB, 9 MB where the server compresses" in text
    assert (
        "Nothing is loaded before you press a button" in text
        and not (tmp_path / "pyodide").exists()
    )


def test_a_folder_that_is_no_copy_of_this_pyodide_is_refused(tmp_path: Path) -> None:
    copy = tmp_path

    def said() -> str:
        with pytest.raises(page_builder.BuildError) as caught:
            page_builder.runtime_files(copy)
        return str(caught.value)

    assert re.search(r"holds no pyodide\.js, .*: unpack npm's pyodide@0", said())
    for name in page_builder.RUNTIME:
        (copy / name).write_bytes(b"")
    numpy = {"file_name": "numpy.whl", "sha256": hashlib.sha256(b"wheel").hexdigest()}
    lock = {"info": {"version": "0.1"}, "packages": {"numpy": numpy}}
    (copy / "pyodide-lock.json").write_text(json.dumps(lock))
    assert f"holds Pyodide 0.1, and the page is for {page_builder.VERSION}" in said()
    lock["info"] = {"version": page_builder.VERSION}
    (copy / "pyodide-lock.json").write_text(json.dumps(lock))
    assert "holds no numpy.whl" in said()
    (copy / "numpy.whl").write_bytes(b"another")
    assert "is not the file that pyodide-lock.json names" in said()
    (copy / "numpy.whl").write_bytes(b"wheel")
    found = page_builder.runtime_files(copy)
    assert {file.name for file in found} == {*page_builder.RUNTIME, "numpy.whl"}


@WITH_PYODIDE
def test_the_page_says_how_much_it_loads_from_the_network() -> None:
    found = page_builder.sizes(page_builder.runtime_files(Path(PYODIDE)))
    for how, bytes in page_builder.BYTES.items():
        assert bytes == pytest.approx(found[how], rel=0.05)


# ---------------------------------------------------------------- what it asks the package


def test_programs_schedules_and_plans_answer_in_words() -> None:
    run = {"model": "llama-8b", "cluster": "h100:16", "batch": "4M", "sequence": "4096"}
    ring, wrong, drawn, stuck, plan, much, many = asked(
        ("run", {"text": RING, "ranks": 4, "clock": "h100"}),
        ("run", {"text": "def program(comm):\n    comm.sent(1)", "ranks": 2, "clock": ""}),
        ("schedule", {"text": "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", "backward": 2}),
        ("schedule", {"text": "0F0 0B0\n1B0 1F0", "backward": 2}),
        ("plan", {"tokens": "1T", "budget": "30000", **run}),
        ("plan", {"tokens": "1T", "budget": "much", **run}),
        ("plan", {"tokens": "many", "budget": "", **run}),
    )
    assert "minidist-player" in ring["player"] and "rank 3 returned 96" in ring["said"]
    assert wrong["failed"].startswith("program.py:2 in program: comm.sent(1)\nAttributeError: ")
    assert wrong["failed"].endswith("raised this")
    assert (drawn["bubble"], drawn["rows"][0]) == ("33.3%", ["rank 0", "3", "2", "0"])
    assert "1B0 stands before 1F0, which it needs" in stuck["failed"] and "[1B0]" in stuck["failed"]
    said = re.search(r"takes ([\d,]+) \$.* about ([\d,]+) billion", plan["said"])
    assert said
    needed, pays = (int(number.replace(",", "")) for number in said.groups())
    assert pays == pytest.approx(1000 * 30_000 / needed, abs=1)
    assert "a budget of 'much' $" in much["failed"]
    assert "--tokens 'many' must be a number: write 1.4T" in many["failed"]


# ---------------------------------------------------------------- how it behaves


def test_an_editor_indents_and_lets_go(desk: Desk) -> None:
    page, area = desk.page, "document.getElementById('run-program')"
    desk.page.visit(desk.url + "run.html")
    desk.write("run", "if a:\n    b")
    page.run(f"{area}.focus(), {area}.setSelectionRange(5, 5)")

    def value() -> Any:
        return page.run(f"{area}.value")

    page.press("Enter")
    assert value() == "if a:\n    \n    b"
    page.run(f"{area}.setSelectionRange(0, 16)")
    page.press("Tab")
    assert value() == "    if a:\n        \n        b"
    page.run("document.execCommand('undo')")
    assert value() == "if a:\n    \n    b"
    page.press("Escape")
    page.press("Tab")
    assert page.run(f"document.activeElement !== {area}")
    assert page.run(f"{area}.previousElementSibling.textContent") == "1\n2\n3"


def test_texts_are_kept_and_begun_again(desk: Desk) -> None:
    page, area = desk.page, "document.getElementById('run-exercise')"
    page.visit(desk.url + "run.html")
    handout = page.run(f"{area}.value")
    assert handout == page_builder.exercises()["01"]
    page.run(f"{area}.value = 'mine', {area}.dispatchEvent(new Event('change'))")
    desk.set("grade", "lesson", "02")
    assert page.run(f"{area}.value") == page_builder.exercises()["02"]
    page.visit(desk.url + "run.html")
    assert page.run(f"{area}.value") == "mine"
    desk.press("grade", "reset")
    assert page.run(f"{area}.value") == handout


def test_every_field_has_a_name_and_360_pixels_are_enough(desk: Desk) -> None:
    page = desk.page
    page.visit(desk.url + "run.html")
    nameless = (
        "[...document.querySelectorAll('input, select, textarea, button')]"
        ".filter(e => !(e.labels?.length || e.textContent.trim())).length"
    )
    assert page.run(nameless) == 0
    page.resize(360)
    assert page.run("document.scrollingElement.scrollWidth") <= 360
    page.resize()
    assert page.errors == []


def test_what_cannot_run_says_so_in_a_sentence(desk: Desk, site: Path) -> None:
    page = desk.page
    with page.before_scripts("delete WebAssembly.Suspending;"):
        page.visit(desk.url + "run.html")
        assert "lacks JavaScript Promise Integration" in page.text("[data-says=refused]")
        assert "lacks JavaScript Promise Integration" in desk.go("run", "run")
    page.inside = "file:"
    page.visit((site / "run.html").as_uri())
    assert "Serve its folder: python -m http.server" in page.text("[data-says=refused]")
    assert page.run("[...document.querySelectorAll('[data-do=run]')].every(b => b.disabled)")
    page.allow_scripts(False)
    page.visit((site / "run.html").as_uri())
    assert "Scripts are off" in page.text("noscript")
    page.allow_scripts(True)
    page.inside = desk.url
    page.visit(desk.url + "run.html")


# ---------------------------------------------------------------- Python in the page


@WITH_PYODIDE
def test_ranks_that_take_turns_give_in_a_browser_what_they_give_here(desk: Desk) -> None:
    """Values, bytes, messages, clocks, interleavings, traces, and reports with their lines."""
    source = Path(cooperative_cases.__file__).read_text()
    desk.write("run", PRINTS_DIGESTS.format(source=source))
    found = dict(line.split() for line in desk.go("run", "run").splitlines() if "_" in line)
    expected = {}
    for case in cooperative_cases.CASES:
        here = json.dumps(case("cooperative")).encode()
        expected[case.__name__] = hashlib.sha256(here).hexdigest()
    assert found == expected


@WITH_PYODIDE
@pytest.mark.parametrize("name", ("ring", "by_hand", "deadlock"))
def test_the_player_in_the_page_is_that_of_the_same_run_here(desk: Desk, name: str) -> None:
    desk.set("run", "example", name)
    desk.press("run", "reset")
    desk.go("run", "run")
    data = '.minidist-player script[type="application/json"]'
    (here,) = asked(("run", {"text": page_builder.examples()[name], "ranks": 4, "clock": ""}))
    expected = re.search(
        r'<script type="application/json">(.*?)</script>', here["player"], re.DOTALL
    )
    assert expected and json.loads(desk.page.text(data)) == json.loads(expected[1])
    desk.page.run("document.querySelector('.minidist-player').focus()")
    desk.page.press("End")
    count = desk.page.text(".minidist-player .count").split(" of ")
    assert count[0] == count[1]
    if name == "deadlock":
        assert "each waits for the next: 0 -> 1 -> 2 -> 3 -> 0" in desk.page.text(".now")


@WITH_PYODIDE
@pytest.mark.parametrize("number", page_builder.exercises())
def test_lessons_are_graded_in_the_page(desk: Desk, number: str) -> None:
    desk.set("grade", "lesson", number)
    desk.press("grade", "reset")
    assert desk.go("grade", "grade").startswith("0 of 6")
    folder = next((ROOT / "lessons").glob(f"{number}_*"))
    desk.write("grade", (folder / "honest.py").read_text())
    said = desk.go("grade", "grade")
    points = re.match(r"(\d+) of (\d+) points", said)
    assert points and points[1] == points[2], said
    desk.write("grade", (folder / "exercise.py").read_text().replace("raise Not", "return Not", 1))
    assert "failed" in desk.go("grade", "grade") and "of exercise.py" not in desk.page.text(
        ".status"
    )


@WITH_PYODIDE
def test_schedules_are_drawn_and_runs_are_planned_in_the_page(desk: Desk) -> None:
    desk.set("schedule", "name", "zb-h1")
    desk.go("schedule", "write_schedule")
    text = desk.page.run("document.getElementById('run-schedule').value")
    run = {"model": "llama-70b", "cluster": "h100:64", "batch": "4M", "sequence": "4096"}
    expected, plan = asked(
        ("schedule", {"text": text, "backward": 2.0}),
        ("plan", {"tokens": "1T", "budget": "500000", **run}),
    )
    said = desk.go("schedule", "schedule")
    assert f"Its bubble is {expected['bubble']} of the step" in said and expected["drawn"] in said
    assert desk.page.run("document.querySelectorAll('[data-part=schedule] svg rect').length") > 90
    said = desk.go("plan", "plan")
    assert plan["said"] in said and all(cell in said for row in plan["rows"] for cell in row)


@WITH_PYODIDE
def test_what_a_browser_lacks_is_told_and_a_run_can_be_stopped(desk: Desk) -> None:
    desk.write("run", ASKS_IN_VAIN)
    said = desk.go("run", "run")
    assert said.count("Python has one thread in a browser: leave engine out") == 3
    assert "No module named 'torch'" in said and "a browser's Python has one thread: use" in said
    desk.write("run", "import mpi4py")
    assert "there is no MPI: run this on your own machine" in desk.go("run", "run")
    desk.write("run", DEEP)
    assert desk.go("run", "run").startswith("1023")
    desk.write("run", "print('begun', flush=True)\nwhile True: pass")
    desk.press("run", "run")
    desk.wait(
        "document.querySelector('[data-part=run] [data-answer]').textContent.includes('begun')"
    )
    desk.press("run", "stop")
    desk.wait("!document.querySelector('.run-here').dataset.busy")
    assert "you stopped it" in desk.page.text(".status")
    desk.write("run", "print('again')")
    # so Firefox notes that a worker was ended in the midst of its work
    assert desk.go("run", "run", told="uncaught exception: undefined").startswith("again")
