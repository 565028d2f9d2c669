"""A step of AdamW over one flat shard: minidist's in one pass, and torch's two implementations that are not naive.

Ranks do not communicate: each takes the same steps by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from minidist.bench.measure import Measurement, alternate
from minidist.bench.options import Options
from minidist.memory.precision.adamw import FusedAdamW

if TYPE_CHECKING:
    from minidist.comm import Communicator

ROUNDS = 15
ELEMENTS = 1 << 22  # of the shard: 16 MiB, far more than a cache holds


def bench_adamw(options: Options, launch: str, comm: Communicator) -> Iterator[Measurement]:
    """Measure seconds of a step."""

    def shard() -> list[torch.nn.Parameter]:
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, ELEMENTS))
        parameter.grad = torch.full_like(parameter, 1e-3)
        return [parameter]

    runs = {
        "one pass": FusedAdamW(shard()).step,
        "torch fused": torch.optim.AdamW(shard(), fused=True).step,
        "torch foreach": torch.optim.AdamW(shard(), foreach=True).step,
    }
    for name, seconds in alternate(runs, comm, options.rounds or ROUNDS).items():
        yield Measurement("adamw", f"{ELEMENTS >> 20} Mi elements", name, launch, seconds, ranks=comm.size)
