"""The list of mutations fits the package: what is to be broken is there, and so are the tests that
must notice.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from mutations import MUTATIONS, Mutation

REPOSITORY = Path(__file__).parents[2]


def test_there_are_many_of_all_floors_and_no_two_alike() -> None:
    assert len(MUTATIONS) >= 60
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    assert len({(mutation.file, mutation.old, mutation.new) for mutation in MUTATIONS}) == len(
        MUTATIONS
    )


@pytest.fixture(scope="module")
def run_each_time(request: pytest.FixtureRequest) -> list[str]:
    """Return the tests that `make test` runs: what this run has collected, if that is all of them;
    else pytest is asked.
    """
    files = {test.split("::")[0] for mutation in MUTATIONS for test in mutation.tests}
    here = [item.nodeid for item in request.session.items]
    if files <= {test.split("::")[0] for test in here} and not request.config.option.keyword:
        return here
    asked = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider"]
    listed = subprocess.run(
        [*asked, *sorted(files)], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert listed.returncode == 0, listed.stdout + listed.stderr
    return [line for line in listed.stdout.splitlines() if "::" in line]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_can_be_made_and_its_tests_run_each_time(
    mutation: Mutation, run_each_time: list[str]
) -> None:
    """Those of the long run would be left out by `make mutants`, too."""
    whole = (REPOSITORY / mutation.file).read_text(encoding="utf-8")
    broken = mutation.broken(whole)  # a slip, not a file that cannot be read
    tomllib.loads(broken) if mutation.file.endswith(".toml") else compile(
        broken, mutation.file, "exec"
    )
    assert mutation.tests
    for test in mutation.tests:
        assert any(each == test or each.startswith(f"{test}[") for each in run_each_time), (
            f"there is no {test}, or it is marked soak"
        )
