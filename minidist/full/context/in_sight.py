"""Keys and values that are seen, and no others: for a window, or documents packed into a row.

    a window of 3 tokens on 3 ranks      rank 0   a b c d      rank 1 sees c d of rank 0, and rank 2 g h of rank 1;
                                         rank 1   e f g h      rank 2 sees nothing of rank 0
                                         rank 2   i j k l

    hop h       rank r sends rank r + h what that sees of its keys, and receives what it sees of those of rank r - h
    backward    the same, and the gradients of what was received go back to where it came from

A ring would carry every block past every rank. Here each part goes directly to who sees it, and
between two ranks that see nothing of each other there is no message. The ring's way has the next
part travel beside computing; the way of all_gather fetches all before it computes.

Cost: with n bytes of keys and values a token, and m of their gradients, n forward and n + m in
backward for each of a rank's tokens and each other rank that sees it. With a window of W tokens in
contiguous order these are W - 1 tokens a rank, but for the last, if a rank has as many; in zigzag
order W - 1 for each of the 2 P - 2 borders of chunks that two ranks share, all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from minidist.full.comm import Communicator
from minidist.full.comm.stream import Stream
from minidist.full.context.order import Meeting, Sight


@dataclass(frozen=True)
class InSight:
    """Fetches what this rank's queries see of the keys of each rank.

    Attributes
    ----------
    comm : Communicator
        Along the context axis.
    sight : Sight
        What is seen.
    stream : Stream, optional
        On which parts travel, one ahead of computing; None: all are fetched before.
    """

    comm: Communicator
    sight: Sight
    stream: Stream[Communicator] | None = None

    def meeting(self, source: int, time: int) -> Meeting | None:
        """Return what this rank's queries have to do with what they see of the keys of `source`."""
        return self.sight.meeting(self.comm.rank, source)

    def blocks(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank, and then each other one before it, and what is seen of its keys and
        values.
        """
        rank, ranks = self.comm.rank, self.comm.size
        ahead = 1 if self.stream else ranks
        arriving = []
        for hop in range(1, min(ranks, 1 + ahead)):
            arriving.append(self.fetch(mine, hop))
        yield rank, mine
        for hop in range(1, ranks):
            block = arriving.pop(0)()
            if hop + ahead < ranks:
                arriving.append(self.fetch(mine, hop + ahead))
            yield (rank - hop) % ranks, block

    def home(self, terms: Iterable[tuple[int, Tensor]]) -> Tensor:
        """Send the gradients of each part home; return those of this rank's keys and values."""
        rank, ranks = self.comm.rank, self.comm.size
        several = iter(terms if self.stream else list(terms))
        _, total = next(several)
        returning = []
        for hop, (source, term) in enumerate(several, start=1):
            reader = (rank + hop) % ranks  # has had a part of this rank's keys
            places = self.sight.wanted(reader, rank)
            arrive = self.begin(term, source, term, places, reader)
            returning.append((places, arrive))
        for places, arrive in returning:
            total.index_add_(-2, places.to(total.device), arrive())
        return total

    def fetch(self, mine: Tensor, hop: int) -> Callable[[], Tensor]:
        """Begin to send what rank r + hop sees of `mine`; return what waits for what is seen of
        rank r - hop.
        """
        rank, ranks = self.comm.rank, self.comm.size
        to = (rank + hop) % ranks
        source = (rank - hop) % ranks
        places = self.sight.wanted(to, rank)
        leaving = mine.index_select(-2, places.to(mine.device))
        wanted = self.sight.wanted(rank, source)
        return self.begin(leaving, to, mine, wanted, source)

    def begin(
        self,
        leaving: Tensor,
        to: int,
        like: Tensor,
        wanted: Tensor,
        source: int,
    ) -> Callable[[], Tensor]:
        """Begin to swap parts with two ranks; return what waits for the one that arrives."""
        *several, _, channels = like.shape
        arriving = like.new_empty((*several, len(wanted), channels))
        if self.stream is not None:
            return self.stream.launch(swap, leaving, to, arriving, source, self.stream.comm).wait
        swap(leaving, to, arriving, source, self.comm)
        return lambda: arriving


def swap(leaving: Tensor, to: int, arriving: Tensor, source: int, comm: Communicator) -> Tensor:
    """Send one part and receive another; what is empty is not sent."""
    if leaving.numel() and arriving.numel():
        comm.exchange(leaving, to, arriving, source)
    elif leaving.numel():
        comm.send(leaving, to)
    elif arriving.numel():
        comm.recv(arriving, source)
    return arriving
