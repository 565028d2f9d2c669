"""What torch's tests say of themselves: the reasons for which torch would skip them.

torch leaves a test out by decorators, of which many wrap the test and end the process when it runs.
While `distributed_test.py` is imported, those that speak of hardware, of a backend or of a flaky
test only note their reason: the test can be run, and one knows before what it asks for.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch.testing._internal import common_distributed, common_utils

GPU = "it needs a GPU"
NCCL = "it needs NCCL"


def noting(why: str) -> Callable[[Any], Any]:
    """Return a decorator that notes a reason, and changes nothing."""

    def mark(test: Any) -> Any:
        test.__dict__.setdefault("skips", []).append(why)
        return test

    return mark


def noting_if(condition: object, why: str) -> Callable[[Any], Any]:
    """The same, where a test would be skipped on a condition."""
    return noting(why) if condition else lambda test: test


@contextmanager
def noted() -> Iterator[None]:
    """Have decorators note their reasons in the body."""
    with ExitStack() as stack:
        for module, name, stand_in in (
            (common_distributed, "skip_if_no_gpu", noting(GPU)),
            (common_distributed, "skip_if_lt_x_gpu", lambda *_: noting(GPU)),
            (common_distributed, "requires_nccl_version", lambda *_: noting(NCCL)),
            (common_utils, "skip_but_pass_in_sandcastle", noting),
            (common_utils, "skip_but_pass_in_sandcastle_if", noting_if),
            (unittest, "skip", noting),
            (unittest, "skipIf", noting_if),
        ):
            stack.enter_context(mock.patch.object(module, name, stand_in))
        yield


def skips(test: Any) -> list[str]:
    """Return the reasons that a test has noted."""
    return list(getattr(test, "skips", ()))
