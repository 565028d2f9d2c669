"""One program of torch.distributed for ranks of any kind: DDP, `fully_shard`, tensor parallelism, a
pipeline and an all-to-all. It knows nothing of ours but the name of the backend.

    mpirun -n 2 python c10d_same_program.py FOLDER minidist
    torchrun --nproc-per-node 2 c10d_same_program.py FOLDER gloo
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH = 2, 8
Found = dict[str, tuple[list[Tensor], int]]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 256), nn.GELU(), nn.Linear(256, 8)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 8, generator=draw, dtype=torch.float64)
    return inputs, torch.randn(BATCH, 8, generator=draw, dtype=torch.float64)


def steps(net: nn.Module, part: slice) -> list[Tensor]:
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, foreach=False)
    for step in range(STEPS):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs[part]), targets[part]).backward()
        optimizer.step()
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return [tensor.detach() for tensor in full]


def ddp(rank: int, ranks: int) -> list[Tensor]:
    net = model()
    with torch.no_grad():
        net[0].weight += rank  # DDP sends rank 0's
    return steps(DistributedDataParallel(net), rows(rank, ranks))


def sharded(rank: int, ranks: int) -> list[Tensor]:
    mesh = dist.init_device_mesh("cpu", (ranks,))
    return steps(fully_shard(model(), mesh=mesh), rows(rank, ranks))


def tensor_parallel(rank: int, ranks: int) -> list[Tensor]:
    mesh = dist.init_device_mesh("cpu", (ranks,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return steps(parallelize_module(model(), mesh, plan), slice(None))


def pipeline(rank: int, ranks: int) -> list[Tensor]:
    assert ranks == 2, "a rank has one linear layer"
    part = model()[:2] if rank == 0 else model()[2:]
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.MSELoss())
    inputs, targets = batch(0)
    schedule.step(inputs) if rank == 0 else schedule.step(target=targets)
    return [p.grad for p in part.parameters() if p.grad is not None]


def exchange(rank: int, ranks: int) -> list[Tensor]:
    sizes = [rank + other + 1 for other in range(ranks)]
    leaving = torch.arange(float(sum(sizes))) + 100 * rank
    arriving = torch.empty(sum(sizes))
    dist.all_to_all_single(arriving, leaving, sizes, sizes)
    return [arriving]


def rows(rank: int, ranks: int) -> slice:
    return slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)


STRATEGIES = (ddp, sharded, tensor_parallel, pipeline, exchange)


def everything(sent: Callable[[], int]) -> Found:
    """Return what each strategy arrives at on this rank, and the bytes that it has sent."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found: Found = {}
    for strategy in STRATEGIES:
        before = sent()
        numbers = strategy(rank, ranks)
        found[strategy.__name__] = numbers, sent() - before
    return found


if __name__ == "__main__":
    folder, backend = sys.argv[1:]
    counted: Callable[[], int] = int
    if backend == "minidist":
        import minidist.torch_backend  # noqa: F401
        from minidist.full.collectives import shared
        from minidist.torch_backend.ranks import RANKS

        shared.possible = lambda comm: False  # messages, as between threads

        def counted() -> int:
            here = RANKS.here()
            return 0 if here is None else here.comm.traffic.bytes

    dist.init_process_group(backend)
    torch.save(everything(counted), Path(folder) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()
