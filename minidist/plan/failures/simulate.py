"""The same by drawing failures: what the closed forms leave out, such as spares that run out.

One number after the other is drawn from a seeded generator: the same arguments give the same answer.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import asdict, dataclass

from minidist.plan.failures.policies import POLICIES, Job

FAILURES = 20_000  # that are drawn: the share is then known to a few tenths of a percent


@dataclass
class Goodput:
    """Where the time goes, as shares of it: they add up to 1.

    Attributes
    ----------
    training : float
        Steps that count: the goodput.
    redone : float
        Steps that failures undid.
    writing : float
        Standing still for checkpoints.
    stopped : float
        Nobody trains: restarts, stalls, waiting for machines.
    missing : float
        Replicas that are out while the others train.
    """

    training: float = 0.0
    redone: float = 0.0
    writing: float = 0.0
    stopped: float = 0.0
    missing: float = 0.0

    def as_shares(self) -> Goodput:
        """Return seconds as shares of their sum."""
        seconds = asdict(self)
        total = sum(seconds.values())
        return Goodput(**{name: value / total for name, value in seconds.items()})


class Simulation:
    """One job, from failure to failure."""

    def __init__(self, job: Job, policy: str, seed: int, failures: int) -> None:
        self.job, self.policy, self.random = job, policy, random.Random(seed)
        self.failures = failures  # that are still to come
        self.now, self.spent = 0.0, Goodput()
        self.away: list[float] = []  # when machines come back from repair
        self.fails = self.draw()

    def draw(self) -> float:
        """Return when the next failure comes."""
        self.failures -= 1
        return self.now + self.random.expovariate(1 / self.job.mtbf)

    def run(self) -> Goodput:
        """Go through the failures; return the shares of the time."""
        go_on = self.go_on_with_others if self.policy == "quorum" else self.go_on
        while self.failures > 0:
            go_on()
        return self.spent.as_shares()

    def go_on(self) -> None:
        """Train until the next failure, and come back from it."""
        self.train(self.fails - self.now)
        self.now = self.fails
        job = self.job
        back = job.stall if self.policy == "replace" else job.restart
        while self.failures > 0:  # where one comes on the way, it begins anew
            self.fails = self.draw()
            ready = self.machine() + back
            if ready <= self.fails:
                self.spent.stopped += ready - self.now
                self.now = ready
                break
            self.spent.stopped += self.fails - self.now
            self.now = self.fails

    def machine(self) -> float:
        """Return when there is a machine in place of the lost one."""
        job = self.job
        if self.policy == "restart":
            return self.now + job.repair
        while self.away and self.away[0] <= self.now:
            heapq.heappop(self.away)
        heapq.heappush(self.away, self.now + job.repair)
        if len(self.away) <= job.spares:
            return self.now
        return heapq.heappop(self.away)

    def train(self, seconds: float) -> None:
        """Spend seconds between two failures: what was not saved is redone."""
        job = self.job
        if self.policy == "replace":
            undone = min(seconds, self.random.uniform(0, job.step))
            self.spent.training += seconds - undone
            self.spent.redone += undone
            return
        saved, rest = divmod(seconds, job.cadence + job.write)
        self.spent.training += saved * job.cadence
        self.spent.writing += saved * job.write
        self.spent.redone += rest

    def go_on_with_others(self) -> None:
        """Train with the replicas that are there until one is lost, or back; then stall."""
        job = self.job
        until = max(self.now, min([self.fails, *self.away[:1]]))  # one may come in a stall
        undone = min(until - self.now, self.random.uniform(0, job.step))
        present = max(0, job.replicas - len(self.away)) / job.replicas
        seconds = until - self.now
        if until < self.fails:  # a replica is back after a whole step
            undone = 0.0
        self.spent.training += (seconds - undone) * present
        self.spent.redone += undone * present
        self.spent.missing += seconds * (1 - present)
        self.now = until
        if self.fails <= until:
            heapq.heappush(self.away, self.now + job.repair + job.restart)
            self.fails = self.draw()
        else:
            heapq.heappop(self.away)
        self.spent.stopped += job.stall
        self.now += job.stall


def simulate(job: Job, policy: str, seed: int = 0, failures: int = FAILURES) -> Goodput:
    """Return where the time of a job goes under a policy.

    Raises
    ------
    ValueError
        If there is no such policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"there is no policy {policy!r}: choose one of {', '.join(POLICIES)}")
    return Simulation(job, policy, seed, failures).run()
