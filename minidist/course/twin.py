"""What every lesson's `cluster.py` calls: one training at full scale, in two ways.

    torchrun --nproc-per-node 4 cluster.py              production's own classes
    torchrun --nproc-per-node 4 cluster.py --minidist   the same training with minidist, on the same wires

One process is one rank: with NCCL on a GPU, of its own or shared (lessons/NCCL.md), or with gloo on
the CPU. Rank 0 prints the losses.
"""

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from minidist.full.comm import Communicator, init

Training = Callable[[Communicator, torch.device], Sequence[float]]


def run_twin(production: Training, ours: Training) -> None:
    """Start torch.distributed, run one of the two trainings, and print its losses.

    Each is called with the communicator of all ranks, which wraps torch.distributed's default
    group, and with this rank's device; it returns the loss of each step, the same on every rank.
    """
    parser = argparse.ArgumentParser(description="A lesson at full scale: start me with torchrun.")
    parser.add_argument(
        "--minidist",
        action="store_true",
        help="train with minidist instead of production's classes",
    )
    options = parser.parse_args()
    comm = init()
    if comm.wire.kind != "torch":
        parser.error(
            "there are no ranks: start me with torchrun --nproc-per-node 2, or with "
            "lessons/cluster.sbatch"
        )
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend() == "nccl"
        else torch.device("cpu")
    )
    name, training = ("minidist", ours) if options.minidist else ("production", production)
    for step, loss in enumerate(training(comm, device), start=1):
        if comm.rank == 0:
            print(
                f"{name} on {comm.size} ranks, {device.type}: step {step}  loss {loss:.9f}",
                flush=True,
            )
