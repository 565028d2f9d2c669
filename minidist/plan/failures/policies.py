"""Four ways to go on when a machine is lost, and in closed form what each leaves of the time.

    restart   ── train ──✗ lost work │ repair the machine │ start, load ── train ──
    spare     ── train ──✗ lost work │ start, load ── train ──            a machine is waiting
    replace   ── train ──✗ stall ── train ──                              a peer's weights: one step is lost
    quorum    ── train ──✗ stall ── train with fewer replicas ─ stall ── train ──

Failures come at random, M seconds apart on average, and may come again before the job is back. What
takes s seconds without one then takes M (e^(s/M) - 1), so a job that stalls for s trains e^(-s/M) of
the time. With checkpoints it is Daly's model (`full/checkpoint/cadence.py`). If a replica is out
for D seconds after each failure, D/M replicas of R are on average, and how many there are at a time is
Poisson's: no more than R can be missed. (Barlow & Proschan 1965, alternating renewal; Daly 2006.)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, lgamma, log

from minidist.full.checkpoint.cadence import daly, shares

POLICIES = ("restart", "spare", "replace", "quorum")


@dataclass(frozen=True)
class Job:
    """A job as failures see it. Times in seconds.

    Attributes
    ----------
    mtbf : float
        Between two failures of the whole job, on average.
    step : float
        Of one step.
    write : float
        That training stands still for a checkpoint.
    restart : float
        Until the whole job trains again: noticed, started, loaded.
    stall : float
        That the other ranks stand still when one is lost and they go on.
    repair : float
        Until a lost machine, or another one, is there.
    replicas : int
        Copies of the model, along the data axis.
    spares : float
        Machines that wait; infinite: always one.
    every : float
        Of training between two checkpoints; 0: Daly's.
    """

    mtbf: float
    step: float
    write: float
    restart: float
    stall: float = 0.0
    repair: float = 0.0
    replicas: int = 1
    spares: float = inf
    every: float = 0.0

    @property
    def cadence(self) -> float:
        """Seconds of training between two checkpoints."""
        return self.every or max(self.step, daly(self.write, self.mtbf))


def closed_form(job: Job, policy: str) -> float:
    """Return the share of the time that trains, if a spare is always there.

    Raises
    ------
    ValueError
        If there is no such policy.
    """
    if policy in ("restart", "spare"):
        down = job.restart + (job.repair if policy == "restart" else 0.0)
        return shares(job.cadence, job.write, job.mtbf, down).training
    if policy == "replace":
        redone = job.step / 2 / job.mtbf
        return max(0.0, 1 - redone) * exp(-job.stall / job.mtbf)
    if policy == "quorum":
        # it stalls once when a replica is lost, and once when it is back
        redone = job.step / 2 / job.mtbf
        there = present((job.repair + job.restart) / job.mtbf, job.replicas)
        return max(0.0, there - redone) * exp(-2 * job.stall / job.mtbf)
    raise ValueError(f"there is no policy {policy!r}: choose one of {', '.join(POLICIES)}")


def present(away: float, replicas: int) -> float:
    """Return the share of the replicas that train, of which `away` would be out on average."""
    if away == 0:
        return 1.0
    found = 0.0
    for out in range(replicas):
        chance = exp(out * log(away) - away - lgamma(out + 1))
        found += chance * (replicas - out)
    return found / replicas
