"""`python -m minidist bench gpu`: what a training step takes on one GPU, by minidist and by torch.

    one process, one rank on NCCL ─▶ nothing is sent: what a strategy costs beside its messages shows

`--device cpu` does the same with tiny sizes over gloo, to try it. Read `competitors.py`, which builds the steps, then
`turns.py`, which measures them side by side, and `subjects.py`, which says in which cases, and has the bounds.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from itertools import groupby

import torch
import torch.distributed as dist

from minidist.bench.machine import machine
from minidist.bench.measure import Measurement
from minidist.bench.options import Options
from minidist.bench.subject import ON_ONE_GPU, Setting, find_subject, measured
from minidist.comm import Communicator, LaunchError, init


def measure(options: Options) -> tuple[dict[str, object], list[Measurement]]:
    """Return the machine with its GPU, and what was measured on it.

    Raises
    ------
    LaunchError
        If there is no GPU.
    """
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise LaunchError(
            f"torch {torch.__version__} finds no GPU here: try it on the CPU with --device cpu, which takes tiny sizes "
            "and judges nothing"
        )
    found: list[Measurement] = []
    # By itself, torch would cut a block's graph where torch DDP's buckets end, for messages that are not sent here; and
    # after too many compilations it would go on without them, and not say so.
    honest = torch._dynamo.config.patch(optimize_ddp=False, fail_on_recompile_limit_hit=True)
    with one_rank(options.device) as comm, honest:
        for bench in map(find_subject, ON_ONE_GPU):
            for case, rows in groupby(measured(bench, Setting(options, "here", comm)), lambda row: row.case):
                print(f"gpu: {bench.name} {case}", file=sys.stderr, flush=True)
                found += rows
    return machine() | {"gpu": torch.cuda.get_device_name() if on_gpu else "none"}, found


@contextlib.contextmanager
def one_rank(device: str) -> Iterator[Communicator]:
    """Return a communicator of this process alone, over NCCL or gloo, which the peers use as well."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]  # at a port that is free
    backend, gpu = ("nccl", torch.device("cuda", 0)) if device == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=gpu)
    try:
        x = torch.ones(16, 16, device=device, requires_grad=True)
        torch.autograd.backward((x @ x).sum())  # libraries get their memory now, and not in the first competitor's name
        yield init()
    finally:
        dist.destroy_process_group()
