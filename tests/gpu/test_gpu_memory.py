"""After `del` of a wrapped model nothing of it stays allocated on the GPU."""

from __future__ import annotations

import pytest
from jobs import CPU, DEVICE, HERE, RANKS, succeeds


@pytest.mark.gpu
@pytest.mark.timeout(130)
@pytest.mark.parametrize("ranks", RANKS)
def test_wrapped_models_that_are_dropped_leave_nothing_allocated(ranks: int) -> None:
    times = 40 if ranks < 4 and not CPU else 10
    said = succeeds(ranks, HERE / "memory_on_ranks.py", str(times), timeout=110)
    assert said.count(f"dropped {times} models on {DEVICE.type}") == ranks
