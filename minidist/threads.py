"""Ranks as threads of one process, and the proof of a deadlock.

    results = run(program, ranks=4)      call program(comm) on four threads; a list of what they return

    rank 0   isend ──┐
                     ├─ the two ends of a message are both there: copy its bytes, wake who waits
    rank 1   irecv ──┘

By default a send waits for its receive, so that a program which works only by luck does not work.

**The proof.** At each wait, and at each end of a rank, one question is asked under one lock: does
every rank that is still running wait for a message that has not come? Then nobody is left who could
post the missing end of any of them: the program is dead, and every rank raises DeadlockError with
the line at which each of them waits. There is no time limit in this, and no guess.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from minidist.cluster import Cluster, Ports
from minidist.comm import Buffer, Communicator, bytes_of, tensor_of

Result = TypeVar("Result")
# Frames that a report passes over, on its way to the line of the program that waits.
NOT_THE_PROGRAM = {__file__, sys.modules[Communicator.__module__].__file__, threading.__file__}


class DeadlockError(RuntimeError):
    """No rank can go on; the text says for what each rank waits, and at which line."""


class Stopped(BaseException):
    """Ends a rank because another one failed. No `except Exception` holds it up."""


def run(
    program: Callable[..., Result],
    ranks: int,
    *arguments: object,
    cluster: Cluster | None = None,
    eager_limit: int = 0,
) -> list[Result]:
    """Call `program(comm, *arguments)` on each of `ranks` threads; return the results by rank.

    Parameters
    ----------
    cluster : Cluster, optional
        Have `comm.clock()` tell the virtual time on this cluster.
    eager_limit : int
        Sends of at most this many bytes return before the matching receive is posted.

    Raises
    ------
    DeadlockError
        If no rank can go on.
    Exception
        The first error of a rank, with a note that names it. It ends the other ranks, too, as soon
        as they wait for a message.
    """
    world = World(ranks, cluster, eager_limit)
    results: dict[int, Result] = {}

    def begin(rank: int) -> None:
        world.idents[rank] = threading.get_ident()
        comm = Communicator(ThreadTransport(world, list(range(ranks)), rank, ("world",), Clock()))
        try:
            results[rank] = program(comm, *arguments)
        except Stopped:
            pass
        except BaseException as error:
            error.add_note(f"on rank {rank} of {ranks}")
            world.fail(error)
        finally:
            world.end(rank)

    threads = [threading.Thread(target=begin, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt as interrupt:
        world.fail(interrupt)
        raise
    if world.failure is not None:
        raise world.failure
    return [results[rank] for rank in range(ranks)]


@dataclass
class Clock:
    """The virtual time of one thread of a rank, in seconds."""

    now: float = 0.0


@dataclass(eq=False)
class Message:
    """One end of a message: a send or a receive, of which the other end may not be there yet."""

    transport: ThreadTransport
    buffer: Any  # its bytes
    sender: int  # number in the world, as below
    receiver: int
    tag: int
    is_send: bool
    left: tuple[float, float] = (0.0, 0.0)  # when it began to leave, and had left
    waiter: int = 0  # the thread that waits for it
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Block until both ends have met; then let the virtual time pass that this took."""
        world, clock = self.transport.world, self.transport.clock_of_thread
        world.wait(self)
        if world.ports is None:
            return
        when = self.left[1]
        if not self.is_send:
            size = self.buffer.nbytes
            when = world.ports.arrive(self.sender, self.receiver, size, self.left[0])
        clock.now = max(clock.now, when)

    def words(self) -> str:
        """Describe this end for a report."""
        peer = (
            f"send to rank {self.receiver}" if self.is_send else f"receive from rank {self.sender}"
        )
        return f"{peer} (tag {self.tag}, {self.buffer.nbytes} bytes)"


class ThreadTransport:
    """Messages between threads; `members` are the ranks of the group, as numbers in the world."""

    def __init__(
        self, world: World, members: list[int], rank: int, name: tuple[Any, ...], clock: Clock
    ) -> None:
        self.world, self.members, self.rank, self.size = world, members, rank, len(members)
        self.name, self.clock_of_thread, self.made = name, clock, Counter[tuple[int, ...]]()

    def isend(self, buffer: Buffer, to: int, tag: int) -> Message:
        sender, receiver = self.members[self.rank], self.members[to]
        message = Message(self, bytes_of(buffer), sender, receiver, tag, is_send=True)
        if self.world.ports is not None:
            now, size = self.clock_of_thread.now, buffer.nbytes
            message.left = self.world.ports.leave(sender, receiver, size, now)
        self.world.post(message)
        return message

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Message:
        sender, receiver = self.members[source], self.members[self.rank]
        message = Message(self, bytes_of(buffer), sender, receiver, tag, is_send=False)
        self.world.post(message)
        return message

    def exchange(self, out: Buffer, to: int, into: Buffer, source: int, tag: int) -> None:
        receive, send = self.irecv(into, source, tag), self.isend(out, to, tag)
        receive.wait()
        send.wait()

    def group(self, members: list[int]) -> ThreadTransport:
        ranks = [self.members[member] for member in members]
        # The n-th group of the same ranks has the same name on each of them.
        self.made[tuple(ranks)] += 1
        name = (*self.name, *ranks, self.made[tuple(ranks)])
        # All ranks: it is a fork, for another thread of this rank, which has a clock of its own.
        own = Clock(self.clock_of_thread.now) if ranks == self.members else self.clock_of_thread
        rank = ranks.index(self.members[self.rank])
        return ThreadTransport(self.world, ranks, rank, name, own)

    def clock(self) -> float:
        return time.perf_counter() if self.world.ports is None else self.clock_of_thread.now

    def advance(self, seconds: float) -> None:
        self.clock_of_thread.now += seconds


class World:
    """State that the threads share: unmatched ends of messages, and who waits."""

    def __init__(self, ranks: int, cluster: Cluster | None, eager_limit: int) -> None:
        self.ranks, self.eager_limit = ranks, eager_limit
        self.ports = None if cluster is None else Ports(cluster, ranks)
        self.lock = threading.Lock()
        self.unmatched: defaultdict[tuple[Any, ...], deque[Message]] = defaultdict(deque)
        self.waiting: dict[int, Message] = {}  # by the thread that waits
        self.idents: dict[int, int] = {}  # the thread of each rank
        self.running = ranks
        self.failure: BaseException | None = None

    def post(self, message: Message) -> None:
        """Match one end of a message with the other, or let it wait for that."""
        key = (message.transport.name, message.sender, message.receiver, message.tag)
        if message.is_send and message.buffer.nbytes <= self.eager_limit:
            numpy = isinstance(message.buffer, np.ndarray)
            message.buffer = message.buffer.copy() if numpy else message.buffer.clone()
            message.done.set()
        with self.lock:
            others = self.unmatched[key]
            if not others or others[0].is_send == message.is_send:
                others.append(message)
                return
            other = others.popleft()
            send, receive = (message, other) if message.is_send else (other, message)
            carry(send, receive)
            for end in (send, receive):
                self.waiting.pop(end.waiter, None)
                end.done.set()

    def wait(self, message: Message) -> None:
        """Block until a message is done, or the program has failed."""
        if not message.done.is_set():
            with self.lock:
                if not message.done.is_set() and self.failure is None:
                    message.waiter = threading.get_ident()
                    self.waiting[message.waiter] = message
                    self.prove()
            if self.failure is None:
                message.done.wait()
        if self.failure is not None:
            deadlock = isinstance(self.failure, DeadlockError)
            raise DeadlockError(*self.failure.args) if deadlock else Stopped

    def end(self, rank: int) -> None:
        """Note that a rank has ended: nobody can wait for it any more."""
        with self.lock:
            self.running -= 1
            self.idents.pop(rank)
            self.prove()

    def fail(self, error: BaseException) -> None:
        """End all ranks because of the first error."""
        with self.lock:
            self.failure = self.failure or error
            self.wake()

    def wake(self) -> None:
        for message in self.waiting.values():
            message.done.set()

    def prove(self) -> None:
        """Fail if every rank that is running waits for a message that has not come."""
        stuck = {rank: self.waiting.get(ident) for rank, ident in self.idents.items()}
        if self.failure or not stuck or len(stuck) < self.running or None in stuck.values():
            return
        self.failure = DeadlockError(self.report({r: m for r, m in stuck.items() if m}))
        self.wake()

    def report(self, stuck: dict[int, Message]) -> str:
        """Say for what each rank waits, at which line, and who waits for whom."""
        frames = sys._current_frames()
        lines = ["no rank can go on."]
        for rank in range(self.ranks):
            if rank not in stuck:
                lines.append(f"  rank {rank} has ended")
                continue
            frame = frames[self.idents[rank]]
            while frame.f_code.co_filename in NOT_THE_PROGRAM and frame.f_back is not None:
                frame = frame.f_back
            where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            inside = frame.f_code.co_name
            lines.append(f"  rank {rank} waits: {stuck[rank].words()} at {where} in {inside}")
        chain = [next(iter(stuck))]
        while (peer := peer_of(stuck.get(chain[-1]))) not in (None, *chain):
            chain.append(peer)  # type: ignore[arg-type]
        if peer in chain:
            cycle = [*chain[chain.index(peer) :], peer]
            lines.append(f"  each waits for the next: {' -> '.join(map(str, cycle))}")
        return "\n".join(lines)


def peer_of(message: Message | None) -> int | None:
    """Return for which rank the owner of a message waits."""
    if message is None:
        return None
    return message.receiver if message.is_send else message.sender


def carry(send: Message, receive: Message) -> None:
    """Copy a message's bytes, between arrays and tensors, too; a tensor on `meta` has none."""
    if send.buffer.nbytes != receive.buffer.nbytes:
        sizes = f"{send.buffer.nbytes} bytes, but the buffer has {receive.buffer.nbytes}"
        raise ValueError(f"rank {send.receiver} receives from rank {send.sender} {sizes}")
    receive.left = send.left
    if isinstance(receive.buffer, np.ndarray):
        receive.buffer[:] = send.buffer
    else:
        receive.buffer.copy_(tensor_of(send.buffer))
