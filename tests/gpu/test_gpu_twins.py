"""Every lesson's twin over NCCL, in production's classes and in ours: the same losses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from jobs import DEVICE, job

TESTS = Path(__file__).parents[1]
PATHS = sorted((TESTS.parent / "lessons").glob("[0-9]*/cluster.py"))


@pytest.mark.gpu
@pytest.mark.timeout(330)
@pytest.mark.parametrize("ranks", [2, 4])
def test_both_twins_of_every_lesson_give_the_same_losses(ranks: int, tmp_path: Path) -> None:
    out, wrong = tmp_path / "losses.json", []
    outcome = job(ranks, TESTS / "twins.py", out, *PATHS, timeout=300)
    assert outcome.returncode == 0
    for told in json.loads(out.read_text()):
        assert len(told) == len(PATHS) >= 22
        for name, facts in told.items():
            ours, production, tolerance = facts["ours"], facts["production"], facts["tolerance"]
            assert facts["device"] == DEVICE.type
            same = len(ours) == len(production) and np.allclose(
                ours, production, rtol=tolerance, atol=0
            )
            if not (same and len(ours) >= 3 and ours[-1] < ours[0]):
                wrong.append(f"{name}: ours {ours}, production {production}, tolerance {tolerance}")
    assert not wrong, "\n".join(wrong)
