"""docs/your-loop.md is true: its blocks are bit-equal to torch's classes on real ranks, and wrong
lines say so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from ranks import mpirun, torchrun

PROGRAM = Path(__file__).parent / "loops_of_users.py"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("launcher", (pytest.param(torchrun, marks=pytest.mark.soak), mpirun))
def test_the_lines_of_a_users_loop(
    launcher: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    done = launcher(2, PROGRAM, str(tmp_path / "store"), timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    everyones = json.loads(done.stdout.splitlines()[-1])
    assert len(everyones) == 2
    for outcome in everyones:
        wrong = outcome.pop("wrong")
        assert [what for what, how in outcome.items() if not all(how.values())] == [], outcome
        assert all(len(how) >= 6 for how in outcome.values())
        assert [row for row in wrong if row[1] != row[2]] == []
        assert len(wrong) > 10
