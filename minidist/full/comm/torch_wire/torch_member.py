"""Members of a job that are processes: `python -m minidist launch --replace` starts them.

    launcher     the store, a small TCP server; it starts processes, and writes down who has ended
    process 0    enter ─▶ view 1: gloo group of 0 1 2 ─▶ a rank is lost ─▶ view 2: group of 0 2 3

Each view has a gloo group of its own, which finds its ranks under a prefix of the store, and if
every member has a GPU one of NCCL. Its kernels wait on the GPU for a rank that is lost: to cut a
view is to abort them.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from minidist.full.comm.communicator import Communicator
from minidist.full.comm.errors import LaunchError, QuorumError, RankFailed
from minidist.full.comm.job.limit import time_limit
from minidist.full.comm.job.watchdog import Watchdog
from minidist.full.comm.membership.agreement import Wanted
from minidist.full.comm.membership.member import Member
from minidist.full.comm.report import marked_traceback, tell
from minidist.full.comm.torch_wire.gpus import own_gpu
from minidist.full.comm.torch_wire.sockets import Sockets
from minidist.full.comm.torch_wire.store import StoreMailbox
from minidist.full.comm.torch_wire.tcp_store import TcpStore
from minidist.full.comm.torch_wire.torch_groups import abort_nccl, everyone, new_group
from minidist.full.comm.torch_wire.torch_wire import PATIENCE, TorchWire, communicator

CONNECTING = 10.0  # seconds that ranks of a new view have to find each other
LEAVING = 5.0  # seconds that a rank which is done waits for the others to be


class ViewMailbox(StoreMailbox):
    """The texts between watchdogs of one view. What would end a job ends the view."""

    member: TorchMember

    def receive(self) -> tuple[int, str] | None:
        """Return a text that has come, or None. Stop waiting for others if the view is over."""
        with suppress(RuntimeError):
            if self.member.is_over():
                self.member.cut()
        return super().receive()

    def exit(self) -> None:
        """End the view, as one operation has taken too long."""
        self.member.lost("an operation has taken longer than it may")

    def end_job(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """End the view, because of an error on a thread that nobody waits for."""
        self.member.lost(f"{kind.__name__}: {error}")

    def _follow_failure(self) -> None:
        """Do nothing: nobody writes a failure of the whole job."""


class TorchMember(Member):
    """A member that is this process."""

    store: TcpStore

    def __init__(
        self, store: TcpStore, number: int, limit: float, gpu: int | None = None, **options: Any
    ) -> None:
        super().__init__(store, number, **options)
        self.limit, self.gpu, self.sockets = limit, gpu, Sockets()
        self.is_cut = False
        self.watchdog: Watchdog | None = None

    def enter(self, done: int = -1, place: int = 0) -> Communicator | None:
        """Join a view, and return a communicator between its members; None: the job is done.

        Raises as `join`, or if the launcher, and with it the store, is gone.
        """
        self._close()
        while True:
            try:
                view = self.join(done, place)
            except RuntimeError as error:
                raise error if isinstance(error, QuorumError) else QuorumError(GONE) from None
            if view is None:
                return None
            try:
                return self._connect(view.members)
            except (RuntimeError, ValueError) as error:
                self.lost(f"member {self.number} has not found the others: {error}")
                self._close()

    def lost(self, reason: str) -> None:
        """End the view because a rank is lost: every member stops waiting for the others."""
        with suppress(RuntimeError):
            self.leave(reason)
        self.cut()

    def cut(self) -> None:
        """Wake whoever waits for a message here: on the CPU with an error, on a GPU with rubbish in
        its place, which `check` tells.
        """
        self.is_cut = True
        self.sockets.cut()
        if self.gpu is not None:
            abort_nccl()

    def is_awaited(self) -> bool:
        """Tell whether somebody waits outside; RankFailed if the launcher is gone, which `enter`
        then tells.
        """
        try:
            return super().is_awaited()
        except RuntimeError:
            raise RankFailed(GONE) from None

    def check(self) -> None:
        """Raise RankFailed if the view was cut: what a GPU has computed since may be rubbish."""
        if self.is_cut:
            raise RankFailed(f"view {self.view.number} is over, as a rank was lost")

    def finish(self, status: int = 0) -> None:
        """Say that the job is done, and stay until the other ranks of the view are through: what
        they still receive from here must not be lost. On a GPU a program calls `end` at its end.
        """
        left, deadline = f"left {self.view.number}", time.monotonic() + LEAVING
        with suppress(RuntimeError):
            super().finish(status)
            self.store.append(left, f"{self.number} ")
            while time.monotonic() < deadline and not self.is_over():
                gone = {*map(int, self.store.read(left).split()), *self.dead()}
                if gone >= set(self.view.members):
                    break
                self.store.wait()
        if self.gpu is None:
            self._close()

    def end(self, status: int) -> NoReturn:
        """End this process, the last that a program does: NCCL's own end, which Python's would bring
        about, waits for ranks that are gone, and between ranks that share a GPU does not come.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _connect(self, members: tuple[int, ...]) -> Communicator:
        rank, place = members.index(self.number), f"view {self.view.number}"
        within = timedelta(seconds=CONNECTING)
        with self.sockets.opening():
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(place, self.store.tcp),  # type: ignore[attr-defined]
                rank=rank,
                world_size=len(members),
                timeout=within,
            )
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self.limit + PATIENCE))
        self.is_cut, cuda = False, None
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)
            cuda = new_group(tuple(range(len(members))), within, "nccl")
        comm = communicator(everyone(), self.limit, ViewMailbox, self.sockets, cuda)
        assert isinstance(comm.wire, TorchWire)
        mailbox = comm.wire.job.mailbox
        assert isinstance(mailbox, ViewMailbox)
        mailbox.member = self
        sys.excepthook = self._end  # torch has set its own
        self.watchdog = Watchdog(mailbox, comm, self.limit, mailbox.exit)
        return comm

    def _close(self) -> None:
        """Leave the group of a view that is over."""
        if self.watchdog is not None:
            self.watchdog.stop()
            self.watchdog = None
        with suppress(RuntimeError):
            if self.is_over():
                self.cut()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _end(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """Print the traceback, marked with the member's number, and let the others go on."""
        tell(marked_traceback(self.number, error))
        self.lost(f"member {self.number} is dead: {kind.__name__}: {error}")


GONE = "the launcher of this job is gone, and its store: start it again"


def this_member() -> TorchMember:
    """Return the member that this process is, as its launcher has said.

    Raises
    ------
    LaunchError
        If no launcher has, or members are to share GPUs and cannot.
    """
    if "MINIDIST_STORE" not in os.environ:
        raise LaunchError("no launcher has started this process as a member: see launch --replace")
    host, _, port = os.environ["MINIDIST_STORE"].rpartition(":")
    *wanted, started = map(int, os.environ["MINIDIST_WANTED"].split(","))
    return TorchMember(
        TcpStore(host, int(port)),
        int(os.environ["MINIDIST_MEMBER"]),
        time_limit(None),
        own_gpu(),
        wanted=Wanted(*wanted),
        started=started,
    )
