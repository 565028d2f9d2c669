"""A site stops: who stands still with it, and what is lost.

    meet in every step    ✗ stops all sites, as a failure anywhere does in one job
    meet every H steps    ✗ stops one site; the others go on, and meet without it

Sites that meet in every step are one job, which S times as many machines stop S times as often. A
site that stops alone comes back to what the others have shared: it loses what it has done since
sites met last, at most H steps, and reads no checkpoint. With `replace` and `quorum` it goes on by
itself as it would alone, and loses at most a step. (Douillard et al. 2023 leave out half of what
sites send, at random, and train nearly as well.)

Assumed: a site that comes back begins at once, and the others, whose meetings are smaller
meanwhile, neither wait for it nor lose by it. `train` does not do this: it ends with any site.
"""

from dataclasses import replace

from minidist.plan.failures.policies import Job, closed_form
from minidist.plan.sites.ways import Joined

LEAST = 1e-9  # of the time: so that what never trains takes long, and not for ever


def job_with(way: Joined, job: Job, policy: str, sites: int) -> tuple[Job, str]:
    """Return the job, and the policy, whose share of the time is that of all sites together.

    `job` is a site that trains alone.
    """
    step = way.seconds
    if way.every == 1:
        replicas = sites * job.replicas
        return replace(job, mtbf=job.mtbf / sites, step=step, replicas=replicas), policy
    if policy in ("replace", "quorum"):
        return replace(job, step=step), policy
    away = job.restart + (job.repair if policy == "restart" else 0.0)
    return replace(job, step=step * way.every, stall=away), "replace"


def trains(way: Joined, job: Job, policy: str, sites: int) -> float:
    """Return the share of the time in which sites train, of all the time of all sites."""
    return max(LEAST, closed_form(*job_with(way, job, policy, sites)))
