"""A step of AdamW over one flat shard: minidist's in one pass, and torch's two implementations that are not naive.

Ranks do not communicate: each takes the same steps by itself.
"""

from collections.abc import Iterator

import torch

from minidist.bench.subject import Case, Setting, subject
from minidist.memory.precision.adamw import FusedAdamW

ELEMENTS = 1 << 22  # of the shard: 16 MiB, far more than a cache holds


@subject(peers=("torch fused", "torch foreach"), rounds=15, gloo=False)
def adamw(setting: Setting) -> Iterator[Case]:
    """Seconds of one optimizer step on 4 Mi float32, against `torch.optim.AdamW`. No bound: `fused` is compiled."""

    def shard() -> list[torch.nn.Parameter]:
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, ELEMENTS))
        parameter.grad = torch.full_like(parameter, 1e-3)
        return [parameter]

    runs = {
        "one pass": FusedAdamW(shard()).step,
        "torch fused": torch.optim.AdamW(shard(), fused=True).step,
        "torch foreach": torch.optim.AdamW(shard(), foreach=True).step,
    }
    yield Case(f"{ELEMENTS >> 20} Mi elements", runs)
