"""Ranks that are processes: under `mpirun` over MPI, under `torchrun` over gloo or NCCL.

mpirun -n 4 python program.py                    comm = init()
torchrun --nproc-per-node 4 program.py           comm = init(), the same program
"""

from __future__ import annotations

import os
import sys
import textwrap
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minidist.comm import Buffer, Communicator, Transport, bytes_of

if TYPE_CHECKING:
    import torch


def init() -> Communicator:
    """Return the communicator of all ranks that `mpirun`, `torchrun` or `srun` has started."""
    if "MASTER_ADDR" in os.environ and "RANK" in os.environ:
        return Communicator(torch_transport())
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    launched = os.environ.get("PMI_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    if size == 1 and launched != "1":
        fix = "use the mpirun that was installed with it (python -m pip install mpich)"
        words = f"{launched} ranks were started, but mpi4py sees one, so each would train alone"
        raise RuntimeError(f"{words}: {fix}")
    end_job_on_error(rank, lambda: world.Abort(1))
    return Communicator(MPITransport(world))


def torch_transport() -> TorchTransport:
    """Join the ranks of `torchrun`: NCCL carries between GPUs, gloo between main memories."""
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    end_job_on_error(dist.get_rank(), lambda: os._exit(1))
    return TorchTransport(dist.group.WORLD, list(range(dist.get_world_size())), device)


def end_job_on_error(rank: int, end: Callable[[], object]) -> None:
    """Have an exception on any rank end the whole job: the others would wait for ever for it."""

    def hook(*error: Any) -> None:
        text = "".join(traceback.format_exception(*error))
        print(textwrap.indent(text, f"[rank {rank}] "), file=sys.stderr, flush=True)
        end()

    sys.excepthook = hook


class MPITransport(Transport):
    """Messages by MPI; `comm` is mpi4py's communicator."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()

    def isend(self, buffer: Buffer, to: int, tag: int) -> Any:
        return self.comm.Isend(bytes_of(buffer), to, tag)

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Any:
        return self.comm.Irecv(bytes_of(buffer), source, tag)

    def group(self, members: list[int]) -> MPITransport:
        group = self.comm.Get_group().Incl(members)
        return MPITransport(self.comm.Create_group(group))


class TorchTransport(Transport):
    """Messages by torch.distributed; `members` are the ranks of `group`, as numbers in the job."""

    def __init__(self, group: Any, members: list[int], device: torch.device) -> None:
        import torch.distributed as dist

        self.dist = dist
        self.process_group = group
        self.members = members
        self.device = device
        self.rank = members.index(dist.get_rank())
        self.size = len(members)

    def isend(self, buffer: Buffer, to: int, tag: int) -> Any:
        leaving = tensor_of(buffer)
        return self.dist.isend(leaving, self.members[to], self.process_group, tag)

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Any:
        arriving = tensor_of(buffer)
        return self.dist.irecv(arriving, self.members[source], self.process_group, tag)

    def exchange(self, out: Buffer, to: int, into: Buffer, source: int, tag: int) -> None:
        # One batch: NCCL starts a send and a receive together only if it is told to.
        dist, group = self.dist, self.process_group
        right = self.members[to]
        left = self.members[source]
        send = dist.P2POp(dist.isend, tensor_of(out), right, group, tag)
        receive = dist.P2POp(dist.irecv, tensor_of(into), left, group, tag)
        for request in dist.batch_isend_irecv([send, receive]):
            request.wait()

    def group(self, members: list[int]) -> TorchTransport:
        ranks = [self.members[member] for member in members]
        # By default torch wants all ranks of the job to make every group together.
        made = self.dist.new_group(ranks, use_local_synchronization=True)
        return TorchTransport(made, ranks, self.device)


def tensor_of(buffer: Buffer) -> torch.Tensor:
    """View a buffer as a tensor of its bytes."""
    import torch

    return torch.as_tensor(bytes_of(buffer))
