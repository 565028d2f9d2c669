"""The list of mutations fits the package: what is to be broken is there, and so are the tests that
must notice.
"""

from __future__ import annotations

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


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_can_be_made_and_its_tests_exist(mutation: Mutation) -> None:
    whole = (REPOSITORY / mutation.file).read_text(encoding="utf-8")
    broken = mutation.broken(whole)  # a slip, not a file that cannot be read
    tomllib.loads(broken) if mutation.file.endswith(".toml") else compile(
        broken, mutation.file, "exec"
    )
    assert mutation.tests
    for test in mutation.tests:
        file, name = test.split("::")
        words = f"def {name.partition('[')[0]}("
        assert words in (REPOSITORY / file).read_text(encoding="utf-8"), (
            f"{file} has no {words[4:-1]}"
        )
