"""Which rank is slow? Its waiting does not tell: everybody waits, but for the slow one.

    rank 0   compute ├──────┤ wait ........│ sum of the losses
    rank 1   compute ├──────────────────┤  │               1.5 times as long: named
    rank 2   compute ├──────┤ wait ........│

So a rank is scored by the time that it computes between messages, for the rows that it has, beside
ranks with the same layers. (nvidia-resiliency-ext scores a rank beside the best one as well.)
"""

from collections import deque
from collections.abc import Sequence
from statistics import median, median_low
from typing import NamedTuple

from minidist.full.ddp.sampler import share
from minidist.full.mesh import Layout

SLOW = 1.3  # times as long as its peers: what a busy machine does now and then is less
STEPS = 5  # over which a rank has to be slow, in the median


class Computing(NamedTuple):
    """How long the ranks have computed in a step.

    Attributes
    ----------
    compute_seconds : float
        The longest.
    compute_rank : int
        Whose it was.
    compute_median : float
        The median of all ranks.
    straggler : int or None
        The rank that computes `SLOW` times as long as its peers, if one does.
    straggler_times : float or None
        How many times as long it does.
    """

    compute_seconds: float
    compute_rank: int
    compute_median: float
    straggler: int | None
    straggler_times: float | None = None


def scores(computed: Sequence[float], rows: Sequence[int], stages: Sequence[int]) -> list[float]:
    """Return how many times as long as its peers each rank has computed a row, in one step.

    Parameters
    ----------
    computed : sequence of float
        Seconds, by rank.
    rows : sequence of int
        Of the global batch, by rank. Who has none is not scored: its score is 1.
    stages : sequence of int
        Of the pipeline, by rank. Ranks of one stage are peers: they have the same layers.
    """
    each = [seconds / max(1, count) for seconds, count in zip(computed, rows, strict=True)]
    usual: dict[int, float] = {}
    for stage in set(stages):
        peers = [
            seconds
            for seconds, place, count in zip(each, stages, rows, strict=True)
            if place == stage and count
        ]
        # of two ranks the faster one is usual
        usual[stage] = median_low(peers) if peers else 0.0
    return [
        seconds / usual[stage] if usual[stage] and count else 1.0
        for seconds, stage, count in zip(each, stages, rows, strict=True)
    ]


class Stragglers:
    """Scores the ranks of a layout, step by step.

    Parameters
    ----------
    layout : Layout
    batch : int
        Rows of a global batch, which ranks of the data axis share.
    site : int
        Whose ranks are compared; sites train apart.
    """

    def __init__(self, layout: Layout, batch: int, site: int = 0) -> None:
        places = [layout.coordinate(rank) for rank in range(layout.size // layout.dcn)]
        self.stages = [place["pp"] for place in places]
        parts, first = layout.dcn * layout.dp, site * layout.dp
        rows = [share(batch, parts, first + place["dp"]) for place in places]
        self.rows = [cut.stop - cut.start for cut in rows]
        self.scores: deque[list[float]] = deque(maxlen=STEPS)

    def step(self, computed: Sequence[float]) -> Computing:
        """Take the seconds that each rank has computed in a step; return what they say."""
        self.scores.append(scores(computed, self.rows, self.stages))
        longest = max(computed)
        whose = computed.index(longest)
        straggler, times = self._straggler()
        return Computing(longest, whose, median(computed), straggler, times)

    def _straggler(self) -> tuple[int | None, float | None]:
        if len(self.scores) < STEPS:
            return None, None
        lasting = [median(scores) for scores in zip(*self.scores, strict=True)]
        worst = max(lasting)
        if worst < SLOW:
            return None, None
        return lasting.index(worst), worst
