"""What leaves this folder: the sdist has what README names, and a wheel built from it works where
it is installed.
"""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.message import Message
from pathlib import Path

import numpy as np
import pytest
from ranks import clean_environment

import minidist

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
BUILD = "import sys; from setuptools import build_meta; build_meta.{}(sys.argv[1])"


def build(what: str, source: Path, target: Path) -> Path:
    target.mkdir()
    command = [sys.executable, "-c", BUILD.format(f"build_{what}"), str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, env=clean_environment())
    (file,) = target.iterdir()
    return file


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of a copy of this folder, unpacked: building writes into the folder."""
    folder = tmp_path_factory.mktemp("sdist")
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT, folder / "copy", ignore=left_out)
    with tarfile.open(build("sdist", folder / "copy", folder / "built")) as file:
        filtered = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from 3.11.4 on
        file.extractall(folder, **filtered)
    return folder / f"minidist-{minidist.__version__}"


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built from the sdist alone."""
    return build("wheel", unpacked, tmp_path_factory.mktemp("wheel") / "built")


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder / "site")
    return folder / "site"


def metadata_of(site: Path) -> Message:
    (file,) = site.glob("*.dist-info/METADATA")
    return email.message_from_string(file.read_text(encoding="utf-8"))


def test_the_sdist_has_what_readme_names_and_all_tests(unpacked: Path) -> None:
    named = LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    named += ["Makefile", "CHANGELOG.md", "LICENSE", "demo.toml", "requirements.txt"]
    named += ["CITATION.cff"]
    for folder in ("tests", "docs", "lessons", "notebooks", "minidist"):
        files = (
            path
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        )
        named += [
            str(path.relative_to(ROOT))
            for path in files
            if not path.relative_to(ROOT).name.startswith(".")
        ]
    assert len(named) > 700 and [name for name in named if not (unpacked / name).exists()] == []


def test_a_wheel_says_what_it_is_and_leads_nowhere_that_is_not_there(site: Path) -> None:
    said, (notes,) = metadata_of(site), site.glob("*.dist-info")
    assert {path.name for path in site.iterdir()} == {"minidist", notes.name}
    assert {path.name for path in (site / "minidist/plan").glob("*.toml")} > {
        "rows.toml",
        "sources.toml",
    }
    assert said["Version"] == minidist.__version__ and said["Keywords"]
    assert (
        "Typing :: Typed" in said.get_all("Classifier", [])
        and (site / "minidist" / "py.typed").exists()
    )
    assert not said.get_all("Home-page", []) and not said.get_all("Project-URL", [])
    readme = str(said.get_payload())
    assert said["Description-Content-Type"] == "text/markdown" and not LINK.search(readme)
    assert (
        "what can be combined (`docs/combinations.md`)" in readme and "`CONTRIBUTING.md`" in readme
    )
    assert "[pytorch.org](https://pytorch.org/get-started/locally/)" in readme
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert set(extras.pop("all")) == {need for needs in extras.values() for need in needs}


def test_a_wheel_works_in_an_environment_that_has_numpy_alone(wheel: Path, tmp_path: Path) -> None:
    """Installed by pip, from what was built of the sdist: its command, its ranks, its lessons."""
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    empty = clean_environment() | {"PYTHONPATH": ""}
    options = {"cwd": tmp_path, "env": empty, "capture_output": True, "text": True}
    ran = subprocess.run([*pip, "--no-index", "--no-deps", "--no-compile", str(wheel)], **options)
    assert ran.returncode == 0, ran.stderr
    (packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    for name in ("numpy", "numpy.libs"):
        there = Path(np.__file__).parents[1] / name
        if there.exists():
            (packages / name).symlink_to(there)
    command = str(tmp_path / "venv/bin/minidist")
    ran = subprocess.run([command, "--version"], **options)
    assert ran.stdout == f"minidist {minidist.__version__}\n", ran.stderr
    program = """
import numpy, minidist
from minidist.full.collectives import all_reduce
def ring(comm):
    buffer = numpy.ones(3)
    all_reduce(buffer, comm)
    return buffer.sum()
print(minidist.run(ring, 4), minidist.__file__)
"""
    ran = subprocess.run([str(python), "-c", program], **options)
    assert ran.stdout.count("12.0") == 4 and str(packages) in ran.stdout, ran.stderr
    lessons = (packages / "minidist/lessons").glob("*/exercise.py")
    assert len(list(lessons)) == len(list((ROOT / "lessons").glob("*/exercise.py"))) > 20


def test_an_installed_wheel_makes_the_zip_for_gradescope_without_an_answer(
    site: Path, tmp_path: Path
) -> None:
    environment = clean_environment() | {"PYTHONPATH": str(site)}
    where = [sys.executable, "-c", "import minidist; print(minidist.__file__)"]
    ran = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.stdout.startswith(str(site)), "the installed one is what runs"
    command = [
        sys.executable,
        "-m",
        "minidist",
        "grade",
        "02",
        "--package",
        "--out",
        "autograder.zip",
    ]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    with zipfile.ZipFile(tmp_path / "autograder.zip") as file:
        names = set(file.namelist())
        setup = file.read("setup.sh").decode()
    assert {
        "setup.sh",
        "run_autograder",
        "minidist/__init__.py",
        "minidist/draw/player.html",
    } <= names
    assert {name for name in names if name.startswith("lessons/")} >= {
        "lessons/02_ring_all_reduce/checks.py"
    }
    assert not [
        name for name in names if "solution" in name or "mistakes" in name or "honest" in name
    ]
    assert "'torch>=2.11'" in setup and "'numpy>=2.0'" in setup and "extra ==" not in setup
