"""A job that goes on by itself: it starts again on what is left, or on a spare.

    start 0    4 ranks ── a rank is lost ✗
    start 1    4 ranks ── on the spare, from the newest checkpoint ── another is lost ✗
    start 2    3 ranks ── from the newest checkpoint ── done

The launcher only counts: it does not know what the ranks compute. A program learns by
`comm.start.restarts()` that it was started before; `train` then goes on from its newest checkpoint.
The global batch, its order and the learning rate belong to the step, not to the ranks, so the
trajectory is that of an unbroken run.

With tensor parallelism or a pipeline, a lost rank takes its whole replica with it: `together` ranks.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from minidist.full.comm.errors import LaunchError
from minidist.full.launch.jobs import Outcome

# Exit statuses that say nothing of a machine: done, and input that is as wrong the next time.
FINAL = (0, 2)


@dataclass(frozen=True)
class Restarts:
    """How often a job may start again, and on how many ranks.

    Attributes
    ----------
    ranks : int
        Ranks of the first start.
    most : int
        Starts after the first.
    spares : int
        How often what was lost can be replaced; afterwards the job goes on with less.
    least : int
        The fewest ranks that are worth starting.
    together : int
        Ranks that are lost together: those of a replica.

    Raises
    ------
    LaunchError
        If the numbers do not fit each other.
    """

    ranks: int
    most: int = 0
    spares: int = 0
    least: int = 1
    together: int = 1

    def __post_init__(self) -> None:
        """Refuse numbers that do not fit each other."""
        if self.ranks % self.together:
            raise LaunchError(
                f"--replica {self.together} does not divide {self.ranks} ranks, so no replica would "
                f"be whole: use -n {self.ranks - self.ranks % self.together or self.together}"
            )
        if self.least > self.ranks:
            raise LaunchError(
                f"--min-ranks {self.least} are more than the {self.ranks} of -n: the job could not "
                "start at all"
            )


def run_until_done(start: Callable[[int, int], Outcome], restarts: Restarts) -> Outcome:
    """Call `start(ranks, restart)` until the job is done or may not start again; return how it
    ended.

    What happens is told on standard error, a line each time.
    """
    ranks, spares = restarts.ranks, restarts.spares
    outcome = start(ranks, 0)
    for restart in range(1, restarts.most + 1):
        if outcome.returncode in FINAL or outcome.timed_out:
            break
        if spares:
            spares -= 1
            left = f"on a spare: {spares} left"
        else:
            ranks -= restarts.together
            left = "on what is left"
        lost = f"minidist launch: the job has lost a rank (status {outcome.returncode})"
        if ranks < restarts.least:
            print(
                f"{lost}, and {ranks} ranks are fewer than --min-ranks {restarts.least}: it ends",
                file=sys.stderr,
            )
            break
        print(
            f"{lost}; restart {restart} of at most {restarts.most}, {ranks} ranks, {left}",
            file=sys.stderr,
            flush=True,
        )
        outcome = start(ranks, restart)
    return outcome
