"""Spans as profilers show them: ranges of `torch.profiler`, and of NVTX, which Nsight Systems reads, where CUDA is.

    comm.span("backward")     ├──────────── backward ────────────┤      on the rank's own thread
                                 ├ reduce_scatter ring ┤                on a stream's

A ledger's `mark` makes them. The torch wire's ledgers have one; elsewhere `train --profile` sets it.
"""

from __future__ import annotations

import torch
from torch.autograd import profiler


class Range:
    """A named range in `torch.profiler`'s trace. While nobody profiles, it only looks at torch's own switch."""

    __slots__ = ("name", "recorded")

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.recorded = profiler.record_function(self.name) if profiler._is_profiler_enabled else None
        if self.recorded is not None:
            self.recorded.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: object) -> None:
        if self.recorded is not None:
            self.recorded.__exit__(*raised)


class NvtxRange(Range):
    """The same, and an NVTX range of this thread."""

    __slots__ = ()

    def __enter__(self) -> None:
        torch.cuda.nvtx.range_push(self.name)  # type: ignore[no-untyped-call]
        super().__enter__()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def marker(cuda: bool) -> type[Range]:
    """Return what marks a piece of work for the profilers that there are: `with marker(cuda)("forward"): ...`."""
    return NvtxRange if cuda else Range
