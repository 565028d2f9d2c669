"""What holds for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import torch

# Whoever is started in the background ignores Ctrl-C, and so would every program that is tested: ours is to hear it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A run sets the number of threads as it likes; later tests must not notice."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
