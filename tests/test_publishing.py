"""What only a public copy uses, and nobody runs here: workflows, templates, the citation."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

import minidist

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
ADDRESS = re.compile(r"https?://[^\s\"')>]+")


def read(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def commands(workflow: dict[Any, Any]) -> list[str]:
    """Return the lines that a workflow runs."""
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return [line for step in steps for line in step.get("run", "").splitlines()]


def test_workflows_name_what_is_there() -> None:
    files = sorted(GITHUB.glob("workflows/*.yml"))
    assert [file.name for file in files] == ["pages.yml", "test.yml"]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    for file in files:
        workflow = read(file)
        assert workflow["permissions"]["contents"] == "read" and True in workflow  # the key `on`
        for job in workflow["jobs"].values():
            assert job["steps"] and job["runs-on"]
            for step in job["steps"]:
                assert ("uses" in step) != ("run" in step)
                assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))
        for line in commands(workflow):
            for target in re.findall(r"^make ([\w-]+)", line):
                assert target in targets, line
            for path in re.findall(r"(?<=[ >])((?:docs|tests)/[\w./]+)", line):
                assert (ROOT / path).exists(), line


def test_the_pages_are_those_that_make_site_builds() -> None:
    lines = commands(read(GITHUB / "workflows/pages.yml"))
    ours = re.search(r"^site: setup\n\t(.*?) \$", (ROOT / "Makefile").read_text(), re.M)
    assert ours and ours[1] in lines
    (chosen,) = (re.search(r'"(.*)"', line) for line in lines if line.startswith("grep"))
    required = (ROOT / "requirements.txt").read_text().splitlines()
    assert chosen
    found = [re.split("[>=]", line)[0] for line in required if re.match(chosen[1], line)]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["site"]
    # the package that runs in the page is asked for its schedules
    assert found == ["numpy", *(re.split("[>=]", need)[0] for need in extra)]
    for need in extra:
        assert any(line.split("#")[0].strip() == need for line in required)


def test_tests_run_on_the_pythons_and_systems_that_the_package_names() -> None:
    jobs = read(GITHUB / "workflows/test.yml")["jobs"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [re.search(r"Python :: (3\.\d+)$", line) for line in project["classifiers"]]
    assert jobs["linux"]["strategy"]["matrix"]["python"] == [each[1] for each in named if each]
    (lowest,) = re.findall(r"torch>=(\S+)", " ".join(project["dependencies"]))
    assert f'"torch=={lowest}.*"' in " ".join(commands(read(GITHUB / "workflows/test.yml")))
    systems = jobs["everywhere"]["strategy"]["matrix"]["os"]
    assert systems == ["macos-latest", "windows-latest"]
    assert {"MacOS", "Microsoft :: Windows", "POSIX :: Linux"} <= {
        line.partition("Operating System :: ")[2] for line in project["classifiers"]
    }


def test_issue_templates_ask_for_what_they_say() -> None:
    templates = sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yml"))
    assert [file.name for file in templates] == ["bug.yml", "config.yml", "lesson.yml"]
    for file in templates:
        if file.name != "config.yml":
            template = read(file)
            assert template["name"] and template["description"]
            for field in template["body"]:
                assert field["type"] in ("input", "textarea") and field["attributes"]["label"]


def test_the_citation_is_of_this_version_and_nothing_names_an_address_that_is_not_there() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == minidist.__version__ and citation["license"] == "MIT"
    assert f"\n## {minidist.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert minidist.__version__.partition(".")[0] == "1"
    owner = tomllib.loads((ROOT / "docs/site/owner.toml").read_text())
    assert owner == {"repository": "", "site": ""}, "each owner fills in his own"
    for file in (*GITHUB.rglob("*.yml"), ROOT / "CITATION.cff"):
        assert ADDRESS.findall(file.read_text()) == [], file
