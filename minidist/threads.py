"""Ranks as threads of one process, and the proof of a deadlock.

    results = run(program, ranks=4)      call program(comm) on four threads; a list of what they return

    rank 0   isend ──┐
                     ├─ the two ends of a message are both there: copy its bytes, wake who waits
    rank 1   irecv ──┘

**The proof.** A thread is busy until its jobs have ended: a rank's program, or what was launched on
a `Stream`. At each wait and at each end of a job two numbers are compared: the threads that are busy
and those that wait. If they are equal, no thread is left that could do what the others wait for, and
DeadlockError says at which line each rank waits. There is no time limit, and no guess.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

import numpy as np

from minidist.cluster import Cluster, Ports
from minidist.comm import Buffer, Communicator, Transport, bytes_of, copy

Result = TypeVar("Result")


class DeadlockError(RuntimeError):
    """No rank can go on; the text says for what each rank waits, and at which line."""


def run(
    program: Callable[..., Result],
    ranks: int,
    *arguments: object,
    cluster: Cluster | None = None,
    eager_limit: int = 0,
) -> list[Result]:
    """Call `program(comm, *arguments)` on each of `ranks` threads; return the results by rank.

    On a `cluster`, `comm.clock()` tells virtual time. A send of more than `eager_limit` bytes waits
    for its receive, so that no program works only by luck. The first error of a rank is raised here,
    with a note that names the rank; the other ranks end when they next wait.
    """
    world = World(ranks, cluster, eager_limit)
    results: dict[int, Result] = {}

    def begin(rank: int) -> None:
        transport = ThreadTransport(world, rank, list(range(ranks)), ())
        try:
            results[rank] = program(Communicator(transport), *arguments)
        except BaseException as error:
            error.add_note(f"on rank {rank} of {ranks}")
            world.fail(error)
        finally:
            world.end_job(rank)

    threads = [threading.Thread(target=begin, args=(rank,), daemon=True) for rank in range(ranks)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except KeyboardInterrupt as interrupt:
        world.fail(interrupt)
    if world.failure is not None:
        raise world.failure
    return [results[rank] for rank in range(ranks)]


class Pending:
    """Something that a thread of `rank` waits for, and that a thread of `peer` has to do."""

    def __init__(self, transport: ThreadTransport, peer: int, words: str) -> None:
        self.transport, self.peer, self.words = transport, peer, words
        self.world, self.rank = transport.world, transport.me
        self.done = threading.Event()

    def wait(self) -> None:
        """Block until it is done, or the program has failed."""
        world = self.world
        with world.lock:
            if not self.done.is_set() and world.failure is None:
                world.waiting[self] = sys._getframe()
                world.prove()
        if world.failure is None:
            self.done.wait()
        if world.failure is not None:
            raise SystemExit  # ends this thread; no `except Exception` holds it up

    def set(self) -> None:
        """Note that a job on a stream has ended."""
        with self.world.lock:
            self.world.wake(self)
            self.world.end_job(self.transport)


class Message(Pending):
    """One end of a message: a send or a receive, of which the other end may not be there yet."""

    def __init__(
        self, transport: ThreadTransport, buffer: Buffer, peer: int, tag: int, is_send: bool
    ) -> None:
        self.buffer, self.is_send = bytes_of(buffer), is_send
        other, size = transport.members[peer], buffer.nbytes
        what = "send to" if is_send else "receive from"
        words = f"{what} rank {other} (tag {tag}, {size} bytes)"
        super().__init__(transport, other, words)
        # Virtual times: when it begins to leave, and has left.
        ports = self.world.ports
        self.departure = ports.leave(self.rank, other, size) if is_send else (0.0, 0.0)
        self.world.post(self, (transport.name, tag))

    def wait(self) -> None:
        """Block until both ends have met; then let the virtual time pass that this took."""
        super().wait()
        ports = self.world.ports
        begin, when = self.departure
        if not self.is_send:
            when = ports.arrive(self.peer, self.rank, self.buffer.nbytes, begin)
        ports.now = max(ports.now, when)


class ThreadTransport(Transport):
    """Messages between threads; `members` are the ranks of the group, as numbers in the world."""

    def __init__(self, world: World, me: int, members: list[int], name: tuple[int, ...]) -> None:
        self.world, self.me, self.members, self.name = world, me, members, name
        self.rank, self.size = members.index(me), len(members)
        self.groups = 0  # made from this one

    def isend(self, buffer: Buffer, to: int, tag: int) -> Message:
        return Message(self, buffer, to, tag, is_send=True)

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Message:
        return Message(self, buffer, source, tag, is_send=False)

    def group(self, members: list[int]) -> ThreadTransport:
        ranks = [self.members[member] for member in members]
        # All ranks make their n-th group together, so the number names it on each of them.
        self.groups += 1
        return ThreadTransport(self.world, self.me, ranks, (*self.name, self.groups))

    def event(self) -> Pending:
        with self.world.lock:
            self.world.jobs[self] += 1
        return Pending(self, self.me, "end of a job on its stream")

    def clock(self) -> float:
        return self.world.ports.now if self.world.cluster else super().clock()

    def advance(self, seconds: float) -> None:
        self.world.ports.now += seconds


class World:
    """State that the threads share: unmatched ends of messages, jobs, and who waits."""

    def __init__(self, ranks: int, cluster: Cluster | None, eager_limit: int) -> None:
        self.ranks, self.cluster, self.eager_limit = ranks, cluster, eager_limit
        self.ports = Ports(cluster or Cluster())
        self.lock = threading.RLock()
        self.unmatched: defaultdict[tuple[object, ...], deque[Message]] = defaultdict(deque)
        self.waiting: dict[Pending, FrameType] = {}  # and where in the program
        self.jobs = Counter[object](range(ranks))  # of each busy thread; a rank begins with one
        self.failure: BaseException | None = None

    def post(self, message: Message, route: tuple[object, ...]) -> None:
        """Match one end of a message with the other, or let it wait for that."""
        rank, peer, is_send = message.rank, message.peer, message.is_send
        if is_send and message.buffer.nbytes <= self.eager_limit:
            message.buffer = copy(message.buffer)
            message.done.set()
        with self.lock:
            others = self.unmatched[*route, peer, rank, not is_send]
            if not others:
                self.unmatched[*route, rank, peer, is_send].append(message)
                return
            other = others.popleft()
            send, receive = (message, other) if is_send else (other, message)
            carry(send, receive)
            self.wake(send)
            self.wake(receive)

    def wake(self, pending: Pending) -> None:
        self.waiting.pop(pending, None)
        pending.done.set()

    def end_job(self, thread: object) -> None:
        with self.lock:
            self.jobs -= Counter([thread])  # A thread without a job is not in there.
            self.prove()

    def fail(self, error: BaseException) -> None:
        with self.lock:
            self.failure = self.failure or error
            for pending in list(self.waiting):
                self.wake(pending)

    def prove(self) -> None:
        """Fail if every busy thread waits."""
        if self.waiting and len(self.waiting) == len(self.jobs):
            self.fail(DeadlockError(self.report()))

    def report(self) -> str:
        """Say for what each rank waits, at which line, and who waits for whom."""
        lines = ["no rank can go on."]
        for rank in range(self.ranks):
            stuck = [each for each in self.waiting if each.rank == rank]
            for each in stuck:
                where = line_of(self.waiting[each])
                lines.append(f"  rank {rank} waits: {each.words} at {where}")
            if not stuck:
                lines.append(f"  rank {rank} has ended")
        # Now go from a rank to the one it waits for, until one comes again or waits for none.
        waits_for = {each.rank: each.peer for each in self.waiting if each.peer != each.rank}
        chain, rank = list[int](), min(waits_for, default=-1)
        while rank in waits_for and rank not in chain:
            chain.append(rank)
            rank = waits_for[rank]
        if rank in chain:
            cycle = [*chain[chain.index(rank) :], rank]
            lines.append(f"  each waits for the next: {' -> '.join(map(str, cycle))}")
        return "\n".join(lines)


def line_of(frame: FrameType) -> str:
    """Name the line of the program that has called into this page or `Communicator`."""
    while frame.f_back and frame.f_globals["__name__"] in (__name__, Communicator.__module__):
        frame = frame.f_back
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"


def carry(send: Message, receive: Message) -> None:
    """Copy a message's bytes, between arrays and tensors, too; a tensor on `meta` has none."""
    if send.buffer.nbytes != receive.buffer.nbytes:
        sizes = f"{send.buffer.nbytes} bytes, but the buffer has {receive.buffer.nbytes}"
        raise ValueError(f"rank {receive.rank} receives from rank {send.rank} {sizes}")
    receive.departure = send.departure
    if isinstance(receive.buffer, np.ndarray):
        receive.buffer[:] = send.buffer
    else:
        receive.buffer.copy_(sys.modules["torch"].as_tensor(send.buffer))
