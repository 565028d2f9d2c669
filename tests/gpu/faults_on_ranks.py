"""On two ranks: what goes wrong, by the name of a function here."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import minidist
from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator


def a_rank_is_killed(comm: Communicator, tensor: torch.Tensor) -> None:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(tensor, comm)
    tensor.sum().item()


def collectives_differ(comm: Communicator, tensor: torch.Tensor) -> None:
    comm.debug = True
    all_reduce(tensor[: 5 + comm.rank], comm)


def a_rank_never_comes(comm: Communicator, tensor: torch.Tensor) -> None:
    if comm.rank == 1:
        time.sleep(600)
    comm.debug = True  # the host waits then, and not the GPU alone
    comm.recv(tensor, 1)


def a_rank_never_comes_and_the_gpu_waits(comm: Communicator, tensor: torch.Tensor) -> None:
    if comm.rank == 1:
        time.sleep(600)
    all_reduce(tensor, comm, algorithm="native")
    tensor.sum().item()


if __name__ == "__main__":
    world = minidist.init()
    ones = torch.ones(1000, device="cuda" if world.wire.carries_cuda else "cpu")
    all_reduce(ones, world)
    print(f"up on {ones.device.type}", flush=True)
    globals()[sys.argv[1]](world, ones)
