"""One message of the `torch` wire under way.

Gloo matches tags, but takes a message that is too short without a word and dies of one that is too
long: the size is part of the tag, so messages of unequal size never meet, and the watchdog reports
both ends. NCCL has no tags at all: messages between two ranks match in the order of posting.

In debug mode each message has a `Header` of 24 bytes beside it, over gloo, that tells its tag, size
and dtype: a wrong one, or a wrong order, is then an error at once. It is posted together with its
message, so it makes no valid program wait for ever, but it costs a message: half as much time again
on gloo for 4 KiB, nothing to speak of for 1 MiB.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from minidist.full.comm.buffers import DTYPES, Array, dtype_name
from minidist.full.comm.errors import CommunicationError, MismatchError, RankFailed
from minidist.full.comm.job.background import WorkingThread
from minidist.full.comm.torch_wire.stalls import Stalls
from minidist.full.comm.wire import Request

BITS = 21  # of a tag: users' and the package's own (communicator.TAGS); gloo's has 31
SIZES = (1 << 31 - BITS) - 2  # what is left names the size, and two kinds of headers
HEADER, ORDER = SIZES, SIZES + 1

Verb = Callable[..., Any]  # `dist.isend` or `dist.irecv`


def slot(tag: int, bytes: int) -> int:
    """Return the gloo tag of a message."""
    return tag + (bytes % SIZES << BITS)


@contextmanager
def explaining(peer: str) -> Iterator[None]:
    """Turn errors of torch in the body into ours, which name the other end."""
    try:
        yield
    except CommunicationError:
        raise
    except RuntimeError as error:
        # without gloo's file and advice
        reason = re.sub(r"^\[\S+\] ", "", str(error).split("\n")[0]).split(". ")[0]
        if "Timed out" in reason:
            raise CommunicationError(f"{peer} has not answered in time: {reason}") from None
        raise RankFailed(
            f"{peer} is gone: it was ended, or left without waiting for others ({reason})"
        ) from None


class Header:
    """Tag, size and dtype of one message, sent beside it by `verb`, or received.

    A gloo message's header has the message's own tag. NCCL messages' headers share one, so that
    they match in the order of posting, as the messages do.
    """

    def __init__(
        self,
        verb: Verb,
        group: dist.ProcessGroup,
        address: int,
        member: int,
        tag: int,
        array: Array,
        ordered: bool,
    ) -> None:
        self.member = member
        self.expected = (tag, array.nbytes, DTYPES.index(dtype_name(array)))
        self.numbers = torch.tensor(self.expected)  # which a receive overwrites
        with explaining(f"rank {member}"):
            self.work = verb(
                self.numbers, address, group, ORDER << BITS if ordered else tag + (HEADER << BITS)
            )

    def wait(self) -> None:
        """Block until it is through; raise MismatchError if it announces another message than
        expected.
        """
        with explaining(f"rank {self.member}"):
            self.work.wait()
        tag, bytes, dtype = self.numbers.tolist()
        expected_tag, expected_bytes, expected_dtype = self.expected
        if tag != expected_tag:
            tags = f"sent a message of tag {tag}, but the receive expects tag {expected_tag}"
            fix = "NCCL has no tags, so both ends must post their messages in the same order"
            raise MismatchError(f"rank {self.member} {tags}: {fix}")
        if bytes != expected_bytes:
            sizes = f"sent {bytes} bytes, but the receive has a buffer of {expected_bytes}"
            raise MismatchError(f"rank {self.member} {sizes}: give both the same shape and dtype")
        if dtype != expected_dtype:
            dtypes = f"sent {DTYPES[dtype]}, but the receive has a buffer of"
            raise MismatchError(
                f"rank {self.member} {dtypes} {DTYPES[expected_dtype]}: give both the same dtype"
            )


@dataclass(eq=False)
class GlooRequest(Request):
    """A message over gloo."""

    work: dist.Work
    member: int
    headers: list[Header]
    waiter: WorkingThread | None = None
    error: BaseException | None = None

    def wait(self) -> None:
        """Block until it is through."""
        if self.waiter is None:
            self._wait()
            return
        self.waiter.join()
        self.test()

    def test(self) -> bool:
        """Tell whether `wait` would return at once. Gloo cannot tell, so a thread waits in its
        place.
        """
        if self.waiter is None:
            self.waiter = WorkingThread(self._keep_error, name="waits for gloo")
            self.waiter.start()
        if self.error is not None:
            raise self.error
        return not self.waiter.is_alive()

    def _wait(self) -> None:
        for header in self.headers:
            header.wait()
        with explaining(f"rank {self.member}"):
            self.work.wait()

    def _keep_error(self) -> None:
        try:
            self._wait()
        except BaseException as error:
            self.error = error


@dataclass(eq=False)
class StreamRequest(Request):
    """CUDA messages, posted together. They are through, for the current stream, in its own
    order.
    """

    works: list[dist.Work]
    headers: list[Header]
    member: int
    stalls: Stalls

    def wait(self) -> None:
        """Make the current stream wait. In debug mode block the host too: reports of who waits are
        then exact.
        """
        for header in self.headers:
            header.wait()
        with explaining(f"rank {self.member}"):
            with self.stalls.one():
                for work in self.works:
                    work.wait()
            if self.headers:
                torch.cuda.current_stream().synchronize()

    def test(self) -> bool:
        """Tell whether the messages are through, without waiting."""
        if done := all(work.is_completed() for work in self.works):
            self.wait()
        return done
