"""Spans as profilers show them: ranges of `torch.profiler`, and of NVTX, which Nsight Systems
reads, where CUDA is.

    comm.span("backward")     ├──────────── backward ────────────┤      on the rank's own thread
                                 ├ reduce_scatter ring ┤                on a stream's

A ledger's `mark` is one of these. The torch wire's ledgers have one; elsewhere `train --profile`
sets it.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd import profiler


def on_cpu(name: str) -> AbstractContextManager[Any] | None:
    """Return a named range of `torch.profiler`; None while nobody profiles, which torch's own
    switch says.
    """
    return profiler.record_function(name) if profiler._is_profiler_enabled else None


def on_gpu(name: str) -> AbstractContextManager[Any] | None:
    """Return the same, or else an NVTX range of this thread, which costs nothing much while nobody
    looks.
    """
    return on_cpu(name) or torch.cuda.nvtx.range("{}", name)  # it formats its text
