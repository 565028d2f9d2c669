"""The course as a site: it is built once, without a warning, and then every page of it is read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from browser import BROWSERS, Page, begin
from in_browser import check_page, pale, wait_for
from ranks import clean_environment

pytest.importorskip("furo", reason="no furo is installed: pip install -r requirements.txt")

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs/site"))
from coursesite.docstrings import rendered  # noqa: E402
from figures.fragment import fragment  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # the first test waits for the build
BUILD = [sys.executable, str(ROOT / "docs/site/build.py")]
MOST_BYTES = 300_000  # of a page, besides its pictures
LESSONS = sorted(path.parent.name for path in ROOT.glob("lessons/[0-9][0-9]_*/README.md"))
LINK = re.compile(r'<(\w+)\s[^>]*?\b(href|src)="([^"]*)"')
ID = re.compile(r'\bid="([^"]+)"')
LOADED = ("img", "script", "iframe", "source", "object", "embed")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with `-W` in a folder that is not the repository's."""
    folder = tmp_path_factory.mktemp("site")
    command = [*BUILD, "--to", str(folder / "site"), "--work", str(folder / "work"), "--jobs", "1"]
    built = subprocess.run(command, capture_output=True, text=True, env=clean_environment())
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "site"


def pages_of(site: Path) -> list[Path]:
    """Return all pages but those of source lines."""
    return [page for page in sorted(site.rglob("*.html")) if "source" not in page.parts]


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def places_in(page: Path) -> frozenset[str]:
    return frozenset(ID.findall(text_of(page)))


class Outline(HTMLParser):
    """What of a page a reader's tools see: headings, pictures, fields, names of places."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.headings: list[int] = []
        self.faults: list[str] = []
        self.places: list[str] = []
        self.language = ""
        self.feed(text_of(page))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = dict(attrs)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "html":
            self.language = has.get("lang") or ""
        if tag == "img" and not (has.get("alt") or "").strip():
            self.faults.append(f"a picture without words: {has.get('src')}")
        told = has.get("aria-label") or has.get("aria-hidden")
        if tag == "svg" and has.get("role") == "img" and not told:
            self.faults.append("a drawing without words")
        if has.get("id"):
            self.places.append(str(has["id"]))


def test_everything_that_is_there_has_a_page(site: Path) -> None:
    for folder in LESSONS:
        assert (site / "lessons" / folder / "index.html").exists()
        assert (site / "notebooks" / f"{folder}.html").exists()
    for page in ROOT.glob("docs/*.md"):
        name = "index" if page.stem == "README" else page.stem
        assert (site / "docs" / f"{name}.html").exists()
    for name in ("index", "readme", "weekend", "semester", "fsdp", "run", "search", "genindex"):
        assert (site / f"{name}.html").exists()
    for file in ROOT.glob("minidist/**/*.py"):
        assert (site / "source" / f"{file.relative_to(ROOT)}.html").exists()


def test_a_page_has_title_description_outline_and_a_size(site: Path) -> None:
    titles: dict[str, Path] = {}
    for page in pages_of(site):
        text, outline = text_of(page), Outline(page)
        name = str(page.relative_to(site))
        title = re.search(r"<title>([^<]+)</title>", text)
        assert title and titles.setdefault(title[1], page) == page, f"{name}: {title}"
        description = re.search(r'<meta name="description" content="([^"]+)"', text)
        assert description and len(unescape(description[1])) <= 165, name
        assert outline.language == "en" and outline.faults == [], f"{name}: {outline.faults}"
        assert outline.headings.count(1) == 1, f"{name} has headings {outline.headings}"
        twice = {place for place in outline.places if outline.places.count(place) > 1}
        assert not twice, f"{name} has these places twice: {twice}"
        assert len(text.encode()) <= MOST_BYTES, f"{name} has {len(text.encode()):,} bytes"


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    broken, to_lines = [], 0
    for page in pages_of(site):
        for tag, attribute, said in LINK.findall(text_of(page)):
            address = unescape(said)
            if address.startswith(("http://", "https://", "mailto:", "data:")):
                if tag in LOADED or (tag == "link" and "stylesheet" in said):
                    broken.append(f"{page.relative_to(site)} loads {address}")
                continue
            path, _, place = address.partition("#")
            path = unquote(path.partition("?")[0])
            target = (page.parent / path).resolve() if path else page
            to_lines += place.startswith("L") and "source" in target.parts
            if not target.is_file():
                broken.append(f"{page.relative_to(site)} {attribute}={address}")
            elif place and target.suffix == ".html" and unquote(place) not in places_in(target):
                broken.append(f"{page.relative_to(site)} {attribute}={address}: no such place")
    assert broken == [] and to_lines > 2000


def test_a_link_to_a_line_of_source_leads_to_what_it_names(site: Path) -> None:
    page = text_of(site / "reference/minidist.html")
    names = re.findall(
        r'id="minidist\.ring\.(\w+)".*?href="\.\./source/minidist/ring\.py\.html#L(\d+)"',
        page,
        re.S,
    )
    lines = (ROOT / "minidist/ring.py").read_text().splitlines()
    assert len(names) == 3
    for name, number in names:
        assert lines[int(number) - 1].startswith(f"def {name}(")
    source = text_of(site / "source/minidist/ring.py.html")
    shown = re.findall(r'<a id="L\d+" href="#L\d+">\d+</a>(.*)', source)
    assert [unescape(re.sub("<[^>]+>", "", line)) for line in shown][: len(lines)] == lines


def test_the_reference_says_what_the_docstrings_say(site: Path) -> None:
    """Drawings, costs and sources: the book on the page of the package, which leads to its folders."""
    top = unescape(re.sub("<[^>]+>", "", text_of(site / "reference/minidist.html")))
    assert "then rank r adds its own part to c_r, which is complete." in top
    assert "(Patarasuk & Yuan 2009, section 3.)" in top
    assert "minidist/full" in top and "minidist/plan" in top
    full = unescape(re.sub("<[^>]+>", "", text_of(site / "reference/full.html")))
    assert "minidist/full/collectives" in full


def test_a_lesson_has_its_files_its_neighbours_and_something_to_step_through(site: Path) -> None:
    for place, folder in enumerate(LESSONS):
        text = text_of(site / "lessons" / folder / "index.html")
        for file in (f"lessons/{folder}/exercise.py", f"notebooks/{folder}.ipynb"):
            assert (site / file).read_bytes() == (ROOT / file).read_bytes()
            assert f'href="../../{file}"' in text
        assert f'href="../../notebooks/{folder}.html"' in text
        assert compile((site / "lessons" / folder / "printed.py").read_text(), folder, "exec")
        bar = text.partition("lesson-bar")[2].partition("</ul>")[0]
        around = [other for other in LESSONS[max(0, place - 1) : place + 2] if other != folder]
        assert re.findall(r'href="\.\./(\w+)/index\.html"', bar) == around
        said = re.sub("<[^>]+>", "", unescape(bar))
        titles = [(ROOT / f"lessons/{other}/README.md").read_text() for other in around]
        assert all(title.partition("\n")[0][2:] in said for title in titles), said
        step_through = text.partition('id="step-through-it"')[2]
        assert step_through.count('class="minidist-player"') == 1, folder
        before, _, player = step_through.partition('class="minidist-player"')
        assert len(re.sub("<[^>]+>", "", before)) > 200, f"{folder}: what is there to be seen?"
        assert int(re.search(r'type="range" min="0"\s+max="(\d+)"', player)[1]) >= 10  # type: ignore[index]


def test_a_notebook_has_its_key_frames_folded_and_ends_with_its_lesson(site: Path) -> None:
    for folder in LESSONS:
        text = text_of(site / "notebooks" / f"{folder}.html")
        assert text.count('<details class="key-frames">') == text.count('class="minidist-player"')
        end = text.rpartition("<p>Next: ")[2].partition("</p>")[0]
        assert f'href="../lessons/{folder}/index.html"' in end


def test_the_reference_begins_with_what_a_folder_offers_and_names_lessons(site: Path) -> None:
    text = text_of(site / "reference/full.collectives.html")
    files = re.findall(r'<section id="([a-z-]+)">\s*<h2><code[^>]*><span[^>]*>(\w+)\.py', text)
    names = [name for _, name in files]
    assert names[:2] == ["operations", "choose"] and names[3:] == sorted(names[3:])
    for page, file, lessons in (
        ("minidist", "ring", ["02_ring_all_reduce"]),
        ("full.collectives", "operations", ["02_ring_all_reduce"]),
        ("full.collectives", "hierarchical", ["03_trees_and_meshes"]),
    ):
        text = text_of(site / f"reference/{page}.html")
        section = text.partition(f'<section id="{file}">')[2].partition("<section")[0]
        line = section.partition('class="taught-in"')[2].partition("</p>")[0]
        assert re.findall(r"lessons/(\w+)/index", line) == lessons


def test_pages_are_listed_by_their_titles(site: Path) -> None:
    page = ROOT / "docs/README.md"
    listed = re.findall(r"\[([^]]+)\]\(([\w-]+)\.md\)", page.read_text())
    assert {f"{name}.md" for _, name in listed} == {
        file.name for file in page.parent.glob("*.md")
    } - {"README.md"}
    for title, name in listed:
        assert (page.parent / f"{name}.md").read_text().startswith(f"# {title}\n")


def test_a_number_of_a_text_leads_to_what_was_printed(site: Path) -> None:
    links = 0
    for page in pages_of(site):
        text = text_of(page)
        for place, number in re.findall(
            r'<a class="to-printed[^"]*" href="#(printed-\d+)">(?:<span[^>]*>)?([\d,.]+)', text
        ):
            block = text.partition(f'id="{place}"')[2].partition("</pre>")[0]
            printed = unescape(re.sub("<[^>]+>", "", block)).replace(",", "")
            assert number.replace(",", "") in printed, f"{page.name}: {number}"
            assert "printed by" in text.partition(f'id="{place}"')[2].partition("</p>")[0]
            links += 1
    assert links > 12
    memory = text_of(site / "docs/memory.html")
    assert re.search(r"to-printed[^>]*>(<span[^>]*>)?7\.3<", memory)


def test_the_paths_name_the_lessons_that_the_course_names(site: Path) -> None:
    def lessons(page: str) -> list[str]:
        article = text_of(site / page).partition('role="main"')[2].partition("</article>")[0]
        return list(dict.fromkeys(re.findall(r'href="lessons/(\d\d)_\w+/index\.html"', article)))

    assert lessons("weekend.html") == ["01", "02", "04", "05", "06", "07", "09"]
    assert lessons("fsdp.html") == ["01", "02", "03", "04", "05", "06", "12", "15"]
    assert sorted(lessons("semester.html")) == [folder[:2] for folder in LESSONS]
    assert sorted(lessons("index.html"))[-1] == LESSONS[-1][:2]
    assert set(lessons("index.html")) == {folder[:2] for folder in LESSONS}, "the map has them all"


PATHS = {"weekend": 7, "fsdp": 8, "semester": len(LESSONS)}


def path_lines(page: Path) -> dict[str, list[str]]:
    """The lessons to which a page's lines of paths lead, by the path's page: next, then before."""
    lines = text_of(page).partition('class="path-stops')[2].partition("</ul>")[0].split("<li>")
    found = {}
    for line in lines[1:]:
        (name,) = re.findall(r'class="path[^>]*href="(?:\.\./)+(\w+)\.html"', line)
        found[name] = re.findall(r"lessons/(\w+)/index", line)
    return found


def test_a_path_leads_on_from_each_of_its_stops(site: Path) -> None:
    """With scripts off, too: below the lesson and below its notebook."""
    for path, count in PATHS.items():
        article = text_of(site / f"{path}.html").partition('role="main"')[2]
        stops = list(dict.fromkeys(re.findall(r"lessons/(\d\d_\w+)/index", article)))[:count]
        for place, folder in enumerate(stops):
            after, before = stops[place + 1 : place + 2], stops[place - 1 : place] * (place > 0)
            for page in (f"lessons/{folder}/index.html", f"notebooks/{folder}.html"):
                assert path_lines(site / page)[path] == after + before, (path, page)
    assert "weekend" not in path_lines(site / "lessons/03_trees_and_meshes/index.html")


def test_the_page_that_runs_the_package_has_what_it_loads(site: Path) -> None:
    text = text_of(site / "run.html")
    assert 'class="run-here"' in text and "sidebar-tree" in text and "run here -->" not in text
    assert (site / "run/minidist.zip").stat().st_size > 100_000


def test_the_search_knows_names_and_texts(site: Path) -> None:
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert index.startswith("Search.setIndex(")
    assert '"all_reduce"' in index and "parameter server" not in index.partition('"terms"')[0]
    assert json.dumps("02 · Ring all-reduce") in index or "02 \\u00b7 Ring all-reduce" in index


def test_a_warning_fails_the_build(tmp_path: Path) -> None:
    """A page that leads nowhere is not built around."""
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "index.md").write_text("# A page\n\n[gone](nowhere.md)\n")
    left = ["-c", str(ROOT / "docs/site"), "-d", str(tmp_path / "trees"), str(pages)]
    command = [sys.executable, "-m", "sphinx", "-W", "-q", *left, str(tmp_path / "out")]
    built = subprocess.run(command, capture_output=True, text=True, env=clean_environment())
    assert built.returncode != 0 and "nowhere.md" in built.stderr


def test_a_folder_of_pyodide_has_to_be_there(tmp_path: Path) -> None:
    command = [*BUILD, "--pyodide", str(tmp_path / "none"), "--to", str(tmp_path / "site")]
    built = subprocess.run(command, capture_output=True, text=True, env=clean_environment())
    assert built.returncode == 2 and "unpack Pyodide there first" in built.stderr
    assert not (tmp_path / "site").exists()


def test_the_site_builds_from_the_makefile() -> None:
    shown = subprocess.run(
        [shutil.which("make") or "make", "--dry-run", "site", "PYODIDE=some where"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert 'docs/site/build.py --to site --zip site.zip --pyodide "some where"' in shown.stdout


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module", params=BROWSERS)
def page(
    request: pytest.FixtureRequest, site: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Page]:
    page = begin(request.param, tmp_path_factory.mktemp("browser"))
    try:
        page.inside = site.as_uri()
        yield page
    finally:
        page.close()


def test_pages_of_each_sort_work_in_a_browser(site: Path, page: Page) -> None:
    """With several players on a page, each of which the keyboard leads to its end."""
    players = {"index": 1, "lessons/02_ring_all_reduce/index": 1, "notebooks/02_ring_all_reduce": 2}
    for name in ("reference/full.collectives", "figures/planner", "docs/memory", "lessons/index"):
        players[name] = 0
    for name, count in players.items():
        assert check_page(page, site / f"{name}.html") == count
        for scheme in ("light", "dark"):
            assert pale(page, scheme) == [], f"{name}, {scheme}"
        page.resize(360)
        assert page.run("document.scrollingElement.scrollWidth") <= 360, name
        page.resize()


def test_the_front_page_moves_until_it_is_touched(site: Path, page: Page) -> None:
    page.visit((site / "index.html").as_uri())
    place = "+document.querySelector('.front-player input').value"
    wait_for(page, f"{place} >= 2")
    page.run("document.querySelector('.front-player [data-go=play]').click()")
    assert page.text(".front-player [data-go=play]") == "play"
    page.prefer(still=True)
    page.visit((site / "index.html").as_uri())
    assert page.text(".front-player [data-go=play]") == "play" and page.run(place) == 0
    page.prefer()


@pytest.mark.parametrize("path", ("weekend", "fsdp"))
def test_whoever_follows_a_path_is_led_to_its_end_and_back(
    site: Path, page: Page, path: str
) -> None:
    """From its page by "Begin", and then by each page's own "Next"."""
    start = (site / f"{path}.html").as_uri()
    page.visit(start)
    address, visited = (
        str(page.run("[...document.querySelectorAll('.path-table a')].pop().href")),
        [],
    )
    while address != start:
        assert len(visited) < 20 and address.endswith(f"index.html?path={path}")
        page.visit(address)
        visited.append(address.split("/")[-2])
        assert page.run("document.querySelectorAll('.path-stops li').length") == 1
        assert f"stop {len(visited)} of {PATHS[path]}" in page.text(".on-path")
        notebook = page.run("document.querySelector('.lesson-bar a').href")
        assert notebook.endswith(f"/notebooks/{visited[-1]}.html?path={path}")
        address = str(page.run("document.querySelector('.next-page').href"))
    assert len(visited) == PATHS[path] and page.errors == []
    page.visit(notebook)
    assert page.run("document.querySelector('.next-page').href") == start
    assert page.run("document.querySelector('.lesson-bar a').href").endswith(f"?path={path}")


def test_a_figure_changes_by_keyboard_and_draws_what_it_drew_without_scripts(
    site: Path, page: Page
) -> None:
    drawn = "[...document.querySelectorAll('.minidist-figure svg > *')].map(e => e.tagName)"
    table = "document.querySelector('.minidist-figure table').innerText"
    for name in ("zero", "pipelines"):
        page.allow_scripts(False)
        page.visit((site / f"figures/{name}.html").as_uri())
        without = page.run(drawn), page.run(table), page.text(".said")
        assert page.run("document.querySelector('.minidist-figure form').hidden")
        page.allow_scripts(True)
        page.visit((site / f"figures/{name}.html").as_uri())
        found = page.run(drawn), page.run(table), page.text(".said")
        assert found[1:] == without[1:] and len(without[0]) > 10
        assert found[0].count("rect") == without[0].count("rect")
        page.run("document.querySelector('.minidist-figure input').focus()")
        page.press("ArrowRight")
        assert page.run(table) != found[1]
        page.press("ArrowLeft")
        assert page.text(".said") == found[2] and page.run(table) == found[1]
        assert page.errors == []


def test_two_figures_on_a_page_do_not_disturb_each_other(page: Page, tmp_path: Path) -> None:
    first, second = (fragment(name) for name in ("zero", "context"))
    page.inside = "file:"
    page.open(first + second, tmp_path / "two.html")
    said = "[...document.querySelectorAll('.said')].map(p => p.textContent)"
    before = page.run(said)
    page.run("document.querySelectorAll('.minidist-figure')[1].querySelector('input').focus()")
    page.press("ArrowRight")
    after = page.run(said)
    assert after[0] == before[0] and after[1] != before[1] and page.errors == []


def test_the_search_works_without_a_server(site: Path, page: Page) -> None:
    page.visit((site / "search.html").as_uri() + "?q=reduce_scatter")
    results = "[...document.querySelectorAll('#search-results ul.search a')].map(a => a.href)"
    wait_for(page, f"{results}.length > 5")
    assert any("reference/full.collectives.html" in each for each in page.run(results))
    assert page.errors == []
    page.visit((site / "search.html").as_uri() + "?q=64+H100")
    wait_for(page, f"{results}.length > 5")
    assert page.run(f"{results}[0]").endswith("figures/planner.html")


def test_no_block_of_a_lesson_is_cut_off_and_players_are_low(site: Path, page: Page) -> None:
    """On a screen of 1,280 pixels."""
    page.resize(1280)
    cut = "[...document.querySelectorAll('pre')].filter(it => it.scrollWidth > it.clientWidth)"
    players = "[...document.querySelectorAll('.minidist-player')]"
    for name in (".", *LESSONS):
        page.visit((site / f"lessons/{name}/index.html").as_uri())
        assert page.run(f"{cut}.map(it => it.innerText)") == [], name
        heights = page.run(f"{players}.map(it => it.getBoundingClientRect().height)")
        assert max(heights, default=0) < 900, f"{name}: {heights}"
    assert page.run("document.querySelector('link[rel~=icon]').href").endswith("favicon.svg")
    page.resize()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_every_page_works_in_a_browser(site: Path, page: Page) -> None:
    page.inside = site.as_uri()
    players = 0
    few_sources = sorted((site / "source").rglob("*.html"))[::40]
    for file in sorted({*site.rglob("*.html")} - {*(site / "source").rglob("*.html")}):
        players += check_page(page, file)
        for scheme in ("light", "dark"):
            assert pale(page, scheme) == [], f"{file}, {scheme}"
        page.resize(360)
        assert page.run("document.scrollingElement.scrollWidth") <= 360, file
        page.resize()
    assert players > 30
    for file in few_sources:
        assert check_page(page, file) == 0 and pale(page, "dark") == pale(page, "light") == []


# ---------------------------------------------------------------- docstrings


def test_a_docstring_becomes_paragraphs_lists_drawings_and_definitions() -> None:
    nodes = rendered(DOCSTRING)
    kinds = [node.__class__.__name__ for node in nodes]
    assert kinds == [
        "paragraph",
        "literal_block",
        "bullet_list",
        "rubric",
        "definition_list",
    ]
    assert [node.astext() for node in nodes[0].children] == [
        "Sum ",
        "buffer",
        ", ",
        "in place",
        ".",
    ]
    assert nodes[1].astext() == "rank 0 ──▶ rank 1\n    deeper"
    assert [item.astext() for item in nodes[2].children] == ["one a * b * c", "two, which goes on"]
    (entry,) = nodes[4].children
    assert entry.astext() == "comm : Communicator\n\nThe ranks.\n\nAll of them."


DOCSTRING = """Sum `buffer`, *in place*.

    rank 0 ──▶ rank 1
        deeper

- one a * b * c
- two, which
  goes on

Parameters
----------
comm : Communicator
    The ranks.

    All of them.
"""
