"""On every rank: wrap models and drop them, one after the other; nothing of them stays
allocated.
"""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import torch
from torch import nn

import minidist
from minidist.full import DDP, FSDP, ZeRO1, ZeRO2

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (DDP, {}),
    (ZeRO1, {}),
    (ZeRO2, {}),
    (FSDP, {}),
    (FSDP, {"shard_ranks": 1}),
]
WIDTH = 256
# bytes that come and go beside models: answers to a roll call, for example. A matrix has 64 times
# as many
SMALL = 4096


def allocated(device: torch.device) -> int:
    """Return the bytes of tensors: the GPU's allocator counts them, or else Python's collector
    finds them.
    """
    for thread in threading.enumerate():  # of a stream that is gone, it ends a moment later
        if "stream" in thread.name:
            thread.join(5)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    found = [
        it
        for it in gc.get_objects()
        if type(it) in (torch.Tensor, nn.Parameter) and it.device.type == "cpu"
    ]
    return sum(
        {it.untyped_storage().data_ptr(): it.untyped_storage().nbytes() for it in found}.values()
    )


def groups(pool: Any) -> int:
    """Return how many groups of ranks there are, in use or to be used again."""
    return sum(1 + groups(inner) for _, _, inner in pool.made.values())


def train(
    kind: Any, options: dict[str, Any], comm: minidist.Communicator, device: torch.device
) -> int:
    """Wrap a model, take two steps and drop it; return how many bytes it had allocated."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(device)
    wrapped = kind(model, comm, op="sum", **options)
    optimizer = (
        wrapped.optimizer(torch.optim.AdamW)
        if kind is not DDP
        else torch.optim.AdamW(model.parameters())
    )
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.ones(8, WIDTH, device=device)).sum().backward()
        optimizer.step()
    if hasattr(wrapped, "wait"):
        wrapped.wait()
    torch.cuda.synchronize() if device.type == "cuda" else None
    return torch.cuda.memory_allocated() if device.type == "cuda" else sys.maxsize


def main(times: int) -> None:
    comm = minidist.init()
    cuda = comm.wire.carries_cuda
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    for kind, options in KINDS:
        train(kind, options, comm, device)  # on the way, libraries take workspaces that they keep
    comm.barrier()
    before, made = allocated(device), groups(comm.wire.group.pool)
    for number in range(times):
        kind, options = KINDS[number % len(KINDS)]
        most = train(kind, options, comm, device)
        assert most > before + WIDTH * WIDTH, "it had memory"
        left = allocated(device) - before
        assert left <= SMALL, f"{kind.__name__} {options} leaves {left:,} bytes"
    comm.barrier()
    assert groups(comm.wire.group.pool) == made, "and no groups of ranks"
    print(f"dropped {times} models on {device.type}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
