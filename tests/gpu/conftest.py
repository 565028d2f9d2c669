"""What holds for the tests of GPUs: which of them are in a part, and where there is none.

MINIDIST_TEST_PART=1/3      these files alone: each part is meant to take less than ten minutes on an H100
MINIDIST_TEST_DEVICE=cpu    over gloo, to see whether the tests themselves work
"""

from __future__ import annotations

import os

import pytest
import torch
from jobs import CPU, HERE, PARTS, refusal


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked and belongs to another part."""
    part = os.environ.get("MINIDIST_TEST_PART")
    if not part:
        return
    if part not in PARTS:
        raise pytest.UsageError(f"there is no part {part}: choose one of {', '.join(PARTS)}")
    out = [item for item in items if item.path.parent == HERE and item.path.name not in PARTS[part]]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]


@pytest.fixture(autouse=True)
def a_gpu(request: pytest.FixtureRequest) -> None:
    """End at once what cannot work."""
    if request.node.get_closest_marker("gpu") and not CPU and not torch.cuda.is_available():
        pytest.exit("there is no GPU here: DEVICE=cpu tries the tests themselves", 2)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say it loudly if NCCL has refused what most of these tests are for."""
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if "test_gpu_" in report.nodeid
    ]
    if skipped and (sentence := refusal(2)):
        terminalreporter.section(
            f"{len(skipped)} TESTS OF 2 AND 4 RANKS WERE NOT RUN", red=True, bold=True
        )
        terminalreporter.write_line(sentence)
