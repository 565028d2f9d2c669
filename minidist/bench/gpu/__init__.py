"""`python -m minidist bench gpu`: what a training step takes on one GPU, by minidist and by torch.

    one process, one rank on NCCL ─▶ nothing is sent: what a strategy costs beside its messages shows

`--device cpu` does the same with tiny sizes over gloo, to try it. Read `competitors.py`, which
builds the steps, then `turns.py`, which measures them side by side, and `subjects.py`, which says
in which cases, and has the bounds.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from minidist.full.comm import Communicator, LaunchError, init


@contextlib.contextmanager
def one_rank(device: str) -> Iterator[Communicator]:
    """Return a communicator of this process alone, over NCCL or gloo, which the peers use as well.

    Raises
    ------
    LaunchError
        If there is no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise LaunchError(
            f"torch {torch.__version__} finds no GPU here: try it on the CPU with --device cpu"
        )
    backend, gpu = ("nccl", torch.device("cuda", 0)) if device == "cuda" else ("gloo", None)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=gpu)
    # By itself, torch would cut a block's graph where torch DDP's buckets end, for messages that
    # are not sent here; and after too many compilations it would go on without them, and not say
    # so.
    honest = torch._dynamo.config.patch(optimize_ddp=False, fail_on_recompile_limit_hit=True)
    try:
        x = torch.ones(16, 16, device=device, requires_grad=True)
        # libraries get their memory now, and not in the first competitor's name
        torch.autograd.backward((x @ x).sum())
        with honest:
            yield init()
    finally:
        dist.destroy_process_group()
