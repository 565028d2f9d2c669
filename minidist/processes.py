"""Ranks that are processes: under `mpirun` over MPI, under `torchrun` over gloo or NCCL.

    mpirun -n 4 python program.py                    comm = init()
    torchrun --nproc-per-node 4 program.py           comm = init(), the same program

Both transports carry bytes, so every dtype travels. What a message costs on two cores: 1 µs by MPI
in shared memory, 80 µs by gloo.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minidist.comm import Buffer, Communicator, Request, bytes_of, tensor_of

if TYPE_CHECKING:
    import torch


def init() -> Communicator:
    """Return the communicator of all ranks that `mpirun`, `torchrun` or `srun` has started.

    A program that is started alone is one rank. An exception on any rank ends the whole job.

    Raises
    ------
    RuntimeError
        If a launcher started several ranks, but this Python's MPI sees one: it belongs to another
        MPI than the launcher, and each rank would train alone.
    """
    if "MASTER_ADDR" in os.environ and "RANK" in os.environ:
        return Communicator(TorchTransport.of_job())
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    launched = os.environ.get("PMI_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    if world.Get_size() == 1 and launched != "1":
        fix = "use the mpirun that was installed with it (python -m pip install mpich)"
        raise RuntimeError(f"{launched} ranks were started, but mpi4py sees one: {fix}")
    end_job_on_error(world.Get_rank(), lambda: world.Abort(1))
    return Communicator(MPITransport(world))


def end_job_on_error(rank: int, end: Callable[[], object]) -> None:
    """Have an uncaught exception print its traceback, marked with the rank, and `end` the job.

    Without this the other ranks would wait for ever for one that is gone.
    """

    def hook(*error: Any) -> None:
        lines = "".join(traceback.format_exception(*error)).splitlines()
        print("".join(f"[rank {rank}] {line}\n" for line in lines), file=sys.stderr, end="")
        sys.stderr.flush()
        end()

    sys.excepthook = hook


class MPITransport:
    """Messages by MPI; `comm` is mpi4py's communicator."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()

    def isend(self, buffer: Buffer, to: int, tag: int) -> Request:
        request: Request = self.comm.Isend(bytes_of(buffer), to, tag)
        return request

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        request: Request = self.comm.Irecv(bytes_of(buffer), source, tag)
        return request

    def exchange(self, out: Buffer, to: int, into: Buffer, source: int, tag: int) -> None:
        self.comm.Sendrecv(bytes_of(out), to, tag, bytes_of(into), source, tag)

    def group(self, members: list[int]) -> MPITransport:
        return MPITransport(self.comm.Create_group(self.comm.Get_group().Incl(members)))

    clock = staticmethod(time.perf_counter)

    def advance(self, seconds: float) -> None:
        pass


class TorchTransport:
    """Messages by torch.distributed, in one of its process groups.

    Over NCCL bytes travel from GPU to GPU; a buffer in main memory takes a copy at either end.
    """

    def __init__(self, group: Any, members: list[int], device: torch.device) -> None:
        import torch.distributed as dist

        self.dist, self.process_group, self.members, self.device = dist, group, members, device
        self.rank, self.size = members.index(dist.get_rank()), len(members)

    @classmethod
    def of_job(cls) -> TorchTransport:
        """Join the other ranks of the job."""
        import torch
        import torch.distributed as dist

        device = torch.device("cpu")
        if torch.cuda.is_available():
            local = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
            device = torch.device("cuda", local)
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
        end_job_on_error(dist.get_rank(), lambda: os._exit(1))
        return cls(dist.group.WORLD, list(range(dist.get_world_size())), device)

    def isend(self, buffer: Buffer, to: int, tag: int) -> Request:
        leaving = tensor_of(buffer).to(self.device)
        return Transfer([self.dist.isend(leaving, self.members[to], self.process_group, tag)])

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        into = tensor_of(buffer)
        arriving = into.to(self.device)  # the same tensor, if it is there already
        request = self.dist.irecv(arriving, self.members[source], self.process_group, tag)
        return Transfer([request], arriving, into)

    def exchange(self, out: Buffer, to: int, into: Buffer, source: int, tag: int) -> None:
        # One batch: NCCL starts a send and a receive together only if it is told to.
        leaving, target = tensor_of(out).to(self.device), tensor_of(into)
        arriving, dist, group = target.to(self.device), self.dist, self.process_group
        send = dist.P2POp(dist.isend, leaving, self.members[to], group, tag)
        receive = dist.P2POp(dist.irecv, arriving, self.members[source], group, tag)
        Transfer(dist.batch_isend_irecv([send, receive]), arriving, target).wait()

    def group(self, members: list[int]) -> TorchTransport:
        ranks = [self.members[member] for member in members]
        # By default torch wants all ranks of the job to make every group together.
        made = self.dist.new_group(ranks, use_local_synchronization=True)
        return TorchTransport(made, ranks, self.device)

    clock = staticmethod(time.perf_counter)

    def advance(self, seconds: float) -> None:
        pass


@dataclass
class Transfer:
    """Requests of torch; what has arrived is then copied from the GPU to the buffer."""

    requests: list[Any]
    arriving: torch.Tensor | None = None
    into: torch.Tensor | None = None

    def wait(self) -> None:
        for request in self.requests:
            request.wait()
        if self.into is not None and self.arriving is not None and self.arriving is not self.into:
            self.into.copy_(self.arriving)
