"""How to compare on a machine that is not quiet: competitors take turns, and only ratios within a
turn count.

    round 1   A A A | B B B | C C C          warm up once, iterate, take the slowest rank
    round 2   A A A | B B B | C C C
    ...                                      report medians and quartiles, and the median of the rounds' ratios

A machine that slows down for a second slows a whole round, and leaves its ratios alone.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

from minidist.full.collectives import COLLECTIVES
from minidist.full.comm import Communicator

Run: TypeAlias = Callable[[], object]

ROUND = 0.02  # seconds, about, that one competitor takes in one round
MOST = 2000  # iterations of one competitor in one round

# nccl-tests multiplies bytes/seconds by this to say how busy the slowest link was
# (doc/PERFORMANCE.md there): it is the bytes that have to cross that link for each byte of the
# whole buffer. All sizes here are those of the whole buffer.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    **dict.fromkeys(COLLECTIVES, lambda ranks: (ranks - 1) / ranks),  # but for these
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    **dict.fromkeys(("broadcast", "reduce", "p2p"), lambda ranks: 1.0),
}


class Measurement(NamedTuple):
    """One competitor in one case: a value for each round.

    Attributes
    ----------
    bench, case, competitor : str
        Such as `all_reduce`, `4 KiB` and `auto`. Competitors of one bench, case and launch took
        turns.
    launch : str
        `shipped`, `tuned` (the whole run was told to keep freed memory), `nccl` or `here` (this
        process).
    values : tuple[float, ...]
        Seconds of one iteration, or what `unit` says.
    bytes : int
        The size of the whole buffer, where there is one.
    flops : int
        Floating point operations of an iteration, where they are counted.
    """

    bench: str
    case: str
    competitor: str
    launch: str
    values: tuple[float, ...]
    unit: str = "s"
    bytes: int = 0
    ranks: int = 1
    flops: int = 0

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The bounds of the middle half of the rounds."""
        if len(self.values) < 2:
            return self.median, self.median
        lower, _, upper = statistics.quantiles(self.values, n=4, method="inclusive")
        return lower, upper

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes per second on the slowest link, as nccl-tests define it, or None where nothing is
        sent.
        """
        factor = BUS_FACTORS.get(self.bench)
        return None if factor is None else factor(self.ranks) * self.bytes / self.median

    def ratio(self, peer: "Measurement") -> float:
        """Return the median of the rounds' ratios to `peer`, which took turns with this one."""
        return statistics.median(
            mine / other for mine, other in zip(self.values, peer.values, strict=True)
        )


def alternate(
    runs: Mapping[str, Run], comm: Communicator, rounds: int, round_seconds: float = ROUND
) -> dict[str, tuple[float, ...]]:
    """Let the competitors take turns; return each one's seconds an iteration, by round.

    A round's time is that of the slowest rank, from a barrier to its own end.
    """
    iterations = {}
    for name, run in runs.items():
        timed(run, comm, 1)  # allocates, opens connections
        iterations[name] = max(1, min(MOST, int(round_seconds / timed(run, comm, 1))))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            timed(run, comm, 1 + iterations[name] // 10)
            seconds[name].append(timed(run, comm, iterations[name]))
    return {name: tuple(values) for name, values in seconds.items()}


def timed(run: Run, comm: Communicator, iterations: int) -> float:
    """Return the seconds that the slowest rank, with its GPU, takes for one of so many
    iterations.
    """
    comm.barrier()
    started = time.perf_counter()
    for _ in range(iterations):
        run()
    if comm.wire.carries_cuda:  # the GPU still computes when the last call has returned
        sys.modules["torch"].cuda.synchronize()
    return (
        float(max(comm.all_gather_object(time.perf_counter() - started))) / iterations
    )  # the slowest
