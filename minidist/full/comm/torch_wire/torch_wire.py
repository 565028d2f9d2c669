"""The `torch` wire: ranks are processes of torch.distributed.

    numpy arrays, CPU tensors  ──▶ gloo group: TCP, with tags        waiting blocks the host
    CUDA tensors               ──▶ NCCL group: NVLink, InfiniBand    waiting makes the current CUDA stream wait

A wire holds one group of each kind (no NCCL where there is no GPU a rank), so that small CPU
messages and barriers also work on a cluster. Everything travels as bytes; how single messages do is
in `torch_request.py`.
"""

from __future__ import annotations

import atexit
import sys
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from minidist.full.comm.buffers import Array, as_bytes, device_name
from minidist.full.comm.communicator import Communicator
from minidist.full.comm.engine.host import host
from minidist.full.comm.engine.pool import Group
from minidist.full.comm.errors import LaunchError
from minidist.full.comm.job.watchdog import Watchdog
from minidist.full.comm.ledger import Ledger
from minidist.full.comm.stream import Comm, Stream
from minidist.full.comm.torch_wire import marks
from minidist.full.comm.torch_wire.sockets import Sockets
from minidist.full.comm.torch_wire.stalls import Stalls
from minidist.full.comm.torch_wire.store import StoreMailbox
from minidist.full.comm.torch_wire.torch_groups import (
    gather_answers,
    have_equally_many_groups,
    initialize,
    nccl_group,
    new_group,
    own_store,
)
from minidist.full.comm.torch_wire.torch_request import (
    GlooRequest,
    Header,
    StreamRequest,
    Verb,
    explaining,
    slot,
)
from minidist.full.comm.wire import Request, Wire

# seconds by which torch's own limit lies above ours, so that our report comes first
PATIENCE = 60.0


class Job(NamedTuple):
    """What all communicators of one job share."""

    mailbox: StoreMailbox
    hosts: tuple[str, ...]  # of each rank of the world
    timeout: timedelta
    stalls: Stalls  # of the stream that computes, where there is a GPU
    sockets: Sockets | None = None  # notes those of all groups, where a job outlives its ranks


class TorchWire(Wire):
    """Messages between processes of torch.distributed.

    Attributes
    ----------
    cpu : ProcessGroup
        The gloo group.
    cuda : ProcessGroup or None
        The NCCL group.
    addresses : tuple[int, ...]
        torch.distributed's number of each rank.
    """

    kind = "torch"

    def __init__(
        self,
        group: Group,
        addresses: tuple[int, ...],
        members: tuple[int, ...],
        job: Job,
        name: str = "world",
    ) -> None:
        super().__init__(addresses.index(dist.get_rank()), members, name, job.hosts)
        self.group = group
        self.cpu: dist.ProcessGroup = group.handle[0]
        self.cuda: dist.ProcessGroup | None = group.handle[1]
        self.addresses, self.job, self.carries_cuda = addresses, job, self.cuda is not None
        # NCCL connects at the first operation, in which all ranks must take part
        if self.cuda is not None:
            dist.all_reduce(torch.zeros(1, device="cuda"), group=self.cuda)

    @property
    def device(self) -> torch.device:
        """Where a rank's tensors belong: its GPU, or the CPU."""
        if not self.carries_cuda:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    # ---------------------------------------------------------------- messages

    def isend(self, array: Array, to: int, tag: int) -> Request:
        return self._post(dist.isend, array, to, tag)

    def irecv(self, array: Array, source: int, tag: int) -> Request:
        return self._post(dist.irecv, array, source, tag)

    def _post(self, verb: Verb, array: Array, peer: int, tag: int) -> Request:
        tensor, member, headers = (
            self.byte_tensor(array),
            self.members[peer],
            self._headers(verb, array, peer, tag),
        )
        if device_name(array) == "cuda":
            return self._post_together([(verb, tensor, peer)], headers)
        with explaining(f"rank {member}"):
            work = verb(tensor, self.addresses[peer], self.cpu, slot(tag, len(tensor)))
        return GlooRequest(work, member, headers)

    def _post_together(
        self, messages: list[tuple[Verb, torch.Tensor, int]], headers: list[Header]
    ) -> StreamRequest:
        """Post CUDA messages as one group: what is posted one by one, NCCL runs one after the
        other.
        """
        operations = [
            dist.P2POp(verb, tensor, self.addresses[peer], self.cuda)
            for verb, tensor, peer in messages
            if len(tensor)
        ]
        member = self.members[messages[-1][2]]
        with explaining(f"rank {member}"):
            # NCCL sends nothing where nothing is sent
            works = dist.batch_isend_irecv(operations) if operations else []
        return StreamRequest(works, headers, member, self.job.stalls)

    def exchange(self, leaving: Array, to: int, arriving: Array, source: int, tag: int) -> None:
        if device_name(leaving) != "cuda" or device_name(arriving) != "cuda":
            super().exchange(leaving, to, arriving, source, tag)
            return
        out, into = self.byte_tensor(leaving), self.byte_tensor(arriving)
        headers = self._headers(dist.irecv, arriving, source, tag) + self._headers(
            dist.isend, leaving, to, tag
        )
        self._post_together([(dist.isend, out, to), (dist.irecv, into, source)], headers).wait()

    def _headers(self, verb: Verb, array: Array, peer: int, tag: int) -> list[Header]:
        """Post what in debug mode goes beside a message."""
        if not self.debug:
            return []
        ordered = device_name(array) == "cuda"
        return [
            Header(verb, self.cpu, self.addresses[peer], self.members[peer], tag, array, ordered)
        ]

    def byte_tensor(self, array: Array) -> torch.Tensor:
        """Return the array as a tensor of bytes, on a device that a group of this wire serves."""
        where = device_name(array)
        if where == "cpu":
            memory = as_bytes(array)
            # torch knows no read-only
            return torch.from_numpy(memory if memory.flags.writeable else memory.copy())
        if where != "cuda":
            raise ValueError(f"{where} tensors hold no data to send: use minidist.run, or the CPU")
        assert isinstance(array, torch.Tensor), "only torch has arrays on a GPU"
        if self.cuda is None:
            raise ValueError(
                "these ranks speak gloo, for CPU buffers: use .cpu(), or start one rank per GPU "
                "for NCCL"
            )
        if array.get_device() != (own := torch.cuda.current_device()):
            raise ValueError(
                f"this rank's GPU is cuda:{own}, but the tensor is on {array.device}: move it"
            )
        return array.view(torch.uint8)

    # ---------------------------------------------------------------- groups, streams and memory

    def derive(
        self, parts: list[list[int]], mine: list[int], name: str, for_thread: bool = False
    ) -> TorchWire:
        addresses = tuple(self.addresses[rank] for rank in mine)

        def make() -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
            with self.job.sockets.opening() if self.job.sockets else nullcontext():
                have_equally_many_groups(self.cpu, self.rank)
                cpu = new_group(addresses, self.job.timeout)
            everyones = [[self.addresses[rank] for rank in part] for part in parts]
            return cpu, None if self.cuda is None else nccl_group(
                self.cuda, everyones, addresses, self.job.timeout
            )

        group = self.group.derive(self, parts, mine, make)
        members = tuple(self.members[rank] for rank in mine)
        return TorchWire(group, addresses, members, self.job, name)

    def stream(self, caller: Comm) -> Stream[Comm]:
        if self.cuda is None:
            return super().stream(caller)
        from minidist.full.comm.torch_wire.cuda_stream import CudaStream

        return CudaStream(caller, self.job.stalls)

    def allocate(self, bytes: int, for_torch: bool) -> tuple[Any, list[Any]]:
        on_gpu = self.cuda is not None and for_torch
        return torch.zeros(bytes, dtype=torch.uint8, device="cuda") if on_gpu else np.zeros(
            bytes, np.uint8
        ), []

    @property
    def native(self) -> Any:
        from minidist.full.comm.torch_wire.native_torch import NativeTorch

        where = self.addresses, self.cpu, self.cuda
        return NativeTorch(*where, self.byte_tensor, self.job.stalls)

    def all_gather_object(self, answer: Any) -> list[Any]:
        return gather_answers(self.cpu, self.rank, answer)

    def fail(self, error: BaseException) -> None:
        self.job.mailbox.end_job(type(error), error, error.__traceback__)


def world(limit: float) -> Communicator:
    """Return the communicator of all ranks that torchrun or srun started, armed against hanging.

    CPU buffers travel over gloo. CUDA tensors travel over NCCL if every rank of the machine has a
    GPU, of its own or shared as MINIDIST_RANKS_PER_GPU says; hide the GPUs
    (`CUDA_VISIBLE_DEVICES=`) to work on the CPU.

    Raises
    ------
    LaunchError
        If this torch was built without torch.distributed, or ranks are to share GPUs and cannot.
    """
    if not dist.is_available():
        raise LaunchError(
            "this torch was built without torch.distributed: install another, or use mpirun"
        )
    return wrap(initialize(timedelta(seconds=limit + PATIENCE)), limit)


def wrap(group: dist.ProcessGroup, limit: float) -> Communicator:
    """Return a communicator over an existing group, armed against hanging. Collective over the
    group.

    Its ranks are numbered as in the group, which torch orders by its own ranks.
    """
    comm = communicator(group, limit, StoreMailbox)
    assert isinstance(comm.wire, TorchWire)
    mailbox = comm.wire.job.mailbox
    if comm.size > 1:
        sys.excepthook = mailbox.end_job
        watchdog = Watchdog(mailbox, comm, limit, mailbox.exit)
        atexit.register(mailbox.leave_together, watchdog)
    return comm


def communicator(
    group: dist.ProcessGroup,
    limit: float,
    mailbox: type[StoreMailbox],
    sockets: Sockets | None = None,
    cuda: dist.ProcessGroup | None = None,
) -> Communicator:
    """Return a communicator over an existing group, which nothing guards, and if it is one of gloo
    perhaps over one of NCCL between the same ranks. Collective over the group.
    """
    backends = dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))
    if backends.get("cuda") == "nccl":
        cuda = group
    if cuda is None and backends.get("cpu") != "gloo":
        raise ValueError(
            f"init() wraps groups of gloo or NCCL, not of {backends}: init_process_group('gloo')"
        )
    timeout = timedelta(seconds=limit + PATIENCE)
    addresses = tuple(dist.get_process_group_ranks(group))
    cpu = group if backends.get("cpu") == "gloo" else new_group(addresses, timeout)
    rank, size = dist.get_rank(group), len(addresses)
    hosts = tuple(gather_answers(cpu, rank, host()))
    job = Job(mailbox(own_store(cpu, rank), rank, size), hosts, timeout, Stalls(), sockets)
    ledger = Ledger(mark=marks.on_cpu if cuda is None else marks.on_gpu)
    return Communicator(TorchWire(Group((cpu, cuda)), addresses, tuple(range(size)), job), ledger)
