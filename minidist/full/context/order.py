"""Which tokens of a sequence each rank has, and who has to meet whom when attention is causal.

    12 tokens on 3 ranks    contiguous   0000 1111 2222          rank 0 has the first tokens, which see the fewest
                            zigzag       00 11 22 22 11 00       chunk r, and the r-th from the end
                            striped      012 012 012 012         token i lies on rank i mod P

With a causal mask, a query meets the keys before it. In units of (T/P)² pairs, rank r of the
contiguous order computes r + 1/2: the slowest rank computes (2P - 1)/P times the mean, and all
others wait for it. In zigzag order every rank computes P/2, and at each hop of a ring as much as
every other: half of a block that is all below the diagonal. Striped is even up to T/P pairs a hop,
but each of its blocks is cut by the diagonal, where tiles are computed and thrown away.

             zigzag, own keys          keys of an earlier rank      keys of a later rank
             ◣ .                       ■ .                          . .
             ■ ◣                       ■ .                          ■ ■

With a window, or documents that are packed into a row, a query sees some of the keys before it. Then
a rank needs only those keys of another that one of its own queries sees, and `Sight` says which.

(Zigzag is the order of Llama 3, 2024, section 3.3.2, and of Megatron's context parallelism. Brandon
et al. 2023, "Striped attention".)
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from minidist.full.context.options import ORDERS
from minidist.full.model.seen import Seen, among, first_seen

ALL = slice(None)


class Meeting(NamedTuple):
    """Which of a rank's queries see which keys of another rank.

    Attributes
    ----------
    queries, keys : slice
        Places in what the rank has, in its own order.
    causal : bool
        Whether query i of these sees key j of those only if j <= i.
    seen : Seen, optional
        Which keys each query sees, if that is not all of them.
    """

    queries: slice = ALL
    keys: slice = ALL
    causal: bool = False
    seen: Seen | None = None


@dataclass(frozen=True, eq=False)
class Sight:
    """What the queries of each rank see of the keys of each, where they do not see all before them.

    It is computed on the CPU, by every rank alike: so a rank knows what others see of its own keys,
    and nobody has to ask.

    Attributes
    ----------
    order : str
        The order in which the tokens lie.
    ranks : int
        Among which they are shared out.
    first : Tensor
        The first position that each of the T tokens sees: int64 [b, T].
    found : dict
        What was wanted before: it is the same in all layers, and in backward.
    """

    order: str
    ranks: int
    first: Tensor
    found: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def positions(self, rank: int) -> Tensor:
        """Return the positions of a rank's tokens."""
        return positions(self.order, self.ranks, rank, self.first.shape[1])

    def wanted(self, by: int, source: int) -> Tensor:
        """Return which tokens of `source` some query of rank `by` sees, by their places there."""
        if (by, source) not in self.found:
            self.found[by, source] = self._wanted(by, source)
        return self.found[by, source]

    def _wanted(self, by: int, source: int) -> Tensor:
        keys = self.positions(source)
        mine = self.positions(by)
        seen = among(self.first[:, mine], mine, keys)
        # one more query sees the keys from `first` on, one less those from `end` on
        change = torch.zeros(len(keys) + 1, dtype=torch.int64)
        looking = seen.first < seen.end
        for bound, by_one in ((seen.first, 1), (seen.end, -1)):
            places = bound[looking]
            change.index_add_(0, places, torch.full_like(places, by_one))
        return change.cumsum(0)[:-1].nonzero().flatten()

    def meeting(self, mine: int, source: int) -> Meeting | None:
        """Return what queries of rank `mine` have to do with the keys that they want of `source`.

        None if they want none.
        """
        queries = self.positions(mine)
        keys = self.positions(source)[self.wanted(mine, source)]
        if not len(keys):
            return None
        return Meeting(seen=among(self.first[:, queries], queries, keys))


@lru_cache(maxsize=16)
def sight_of(
    order: str, ranks: int, time: int, window: int, documents: Tensor | None
) -> Sight | None:
    """Return the sight of `time` tokens with a window or documents; None if all before is seen.

    All layers ask with the same documents, and get the same answer.
    """
    if documents is None and not 0 < window < time:
        return None
    return Sight(order, ranks, first_seen(time, window, documents))


def positions(order: str, ranks: int, rank: int, time: int) -> Tensor:
    """Return which positions of a sequence of `time` tokens a rank has, ascending: int64 [T/P].

    Raises
    ------
    ValueError
        If the tokens cannot be shared out evenly, or there is no such order.
    """
    check_time(order, ranks, time)
    everything = torch.arange(time)
    if order == "striped":
        return everything[rank::ranks]
    if order == "contiguous":
        return everything.tensor_split(ranks)[rank]
    chunks = everything.tensor_split(2 * ranks)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def multiple(order: str, ranks: int) -> int:
    """Return the number that must divide the tokens of a sequence."""
    return 2 * ranks if order == "zigzag" and ranks > 1 else ranks


def check_time(order: str, ranks: int, time: int) -> None:
    """Raise ValueError unless so many tokens can be shared out in this order."""
    if order not in ORDERS:
        raise ValueError(
            f"there is no order {order!r} of tokens: choose one of {', '.join(ORDERS)}"
        )
    least = multiple(order, ranks)
    if time % least:
        fault = f"{time} tokens in a row cannot be shared out in {order} order among {ranks} ranks"
        raise ValueError(
            f"{fault}: use a length that {least} divides, such as {time - time % least or least}"
        )


def meeting(order: str, mine: int, source: int, time: int) -> Meeting | None:
    """Return what queries of rank `mine` and keys of rank `source`, `time` tokens each, have to do
    with each other.

    None if every key is later than every query.
    """
    if mine == source or (order == "striped" and source < mine):
        return Meeting(causal=True)
    # its token j comes just after my token j: the mask is strict, so shift by one
    if order == "striped":
        return Meeting(slice(1, None), slice(-1), causal=True) if time > 1 else None
    if order == "zigzag":
        return (
            Meeting(keys=slice(time // 2))
            if source < mine
            else Meeting(queries=slice(time // 2, None))
        )
    return Meeting() if source < mine else None


def pairs(met: Meeting | None, time: int) -> float:
    """Return how many queries see how many keys in a meeting: the work of attention, in pairs.

    The diagonal is half.
    """
    if met is None:
        return 0.0
    queries, keys = len(range(time)[met.queries]), len(range(time)[met.keys])
    return queries * keys / (2 if met.causal else 1)
