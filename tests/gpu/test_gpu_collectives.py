"""Over NCCL: messages, groups, streams, and each collective by every algorithm, dtype, reduction
and odd size.
"""

from __future__ import annotations

import pytest
from jobs import ENGINE, HERE, succeeds
from ranks import torchrun

PROGRAM = HERE / "collectives_on_ranks.py"


@pytest.mark.gpu
@pytest.mark.timeout(270)
@pytest.mark.parametrize(("ranks", "which"), [(1, "all"), (2, "all"), (4, "few")])
def test_every_collective_is_right_on_tensors_of_a_gpu(ranks: int, which: str) -> None:
    said = succeeds(ranks, PROGRAM, which, timeout=240)
    assert said.count(f"on {ranks} ranks, {ENGINE}: ") == said.count(" cells are right") == ranks


def test_the_same_program_is_right_on_gloo() -> None:
    job = torchrun(2, PROGRAM, "few", timeout=100)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("on 2 ranks, gloo: ") == 2
