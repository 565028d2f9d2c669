"""Programs that ask for gloo or NCCL, on ranks that have neither.

    init_process_group("nccl")    on a simulated rank, or a rank of `launch -n 4` over MPI
      └▶ "minidist"               which `dist.get_backend()` then says as well

All groups of torch are made by one function, whoever asks; there a name is put in the place of
another. A process that torchrun has started gets what it asks for. "mpi" is left as it is: torch
asks its own MPI for the ranks then, and says that it was built without.

`monitored_barrier`, which torch has for gloo alone, is a barrier of ours, which always says who has
not come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from minidist.full.comm.start import launched_over_mpi
from minidist.torch_backend.backend import MinidistGroup
from minidist.torch_backend.ranks import RANKS

NAME = "minidist"
OF_TORCH = (
    "undefined",
    "gloo",
    "nccl",
    "ucc",
    "cpu:gloo",
    "cuda:nccl",
    "cpu:gloo,cuda:nccl",
)


def take_any_name() -> None:
    """Have groups that ask for a backend of torch be ours, on ranks that are ours."""
    make = c10d._new_process_group_helper

    @functools.wraps(make)
    def made(size: Any, rank: Any, ranks: Any, backend: Any, *more: Any, **options: Any) -> Any:
        if str(backend) in OF_TORCH and are_ours():
            backend = c10d.Backend(NAME)
            for name in ("backend_options", "device_id"):  # of the backend that was asked for
                options.pop(name, None)
        return make(size, rank, ranks, backend, *more, **options)

    c10d._new_process_group_helper = made  # type: ignore[assignment]
    dist.monitored_barrier = c10d.monitored_barrier = monitored(c10d.monitored_barrier)


def monitored(barrier: Callable[..., None]) -> Callable[..., None]:
    """Return torch's barrier that says who has not come, for groups of ours as well."""

    @functools.wraps(barrier)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        ours = group or c10d._get_default_group()
        if isinstance(ours, MinidistGroup):
            ours.monitored_barrier()
        else:
            barrier(group, timeout, wait_all_ranks)

    return monitored_barrier


def are_ours() -> bool:
    """Tell whether this thread is a simulated rank, or this process one of `launch` over MPI."""
    return RANKS.simulated() is not None or launched_over_mpi()
