"""`train --compile --verify`: compiled blocks, which take most of their time to be compiled."""

from __future__ import annotations

import pytest
from jobs import CPU, verified


@pytest.mark.gpu
@pytest.mark.timeout(330)
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_blocks_train_what_the_serial_run_does(ranks: int) -> None:
    count = 1 if CPU else 2
    verified(ranks, count, "101", str(count), "--compile", timeout=300)
