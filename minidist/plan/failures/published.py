"""What large runs have reported of failures, beside what the policies say.

What is `assumed` is not published: it is said in each row, and the answer depends on it. Sources:

Llama 3     Grattafiori et al. 2024 (2407.21783), section 3.3.4 and table 5: 419 unexpected stops in 54 days of 16,384
            GPUs, over 90 % effective
OPT-175B    the team's notes (metaseq, projects/OPT/chronicles): 10 % on 17 November 2021, 27 % on 3 December after
            40+ restarts without enough spares (a replacement can take hours; nobody worked on the four days of a
            holiday), 56 % on 16 December with a pool of spares, 100 % on 6 January 2022 (the cluster was deleted by
            mistake, and gone for two and a half days); 33 days of continuous training in all; some two machines go down
            each day. What was thrown away for instability is in the reported shares, and in no prediction
BLOOM       Le Scao et al. 2022 (2211.05100), section 3.4: one or two GPU failures a week, a checkpoint every three
            hours, four spare nodes; tr11-176B-ml: 105 s a step, 2.3 TB written in 40 s. 366 billion tokens are 87,262
            steps, 105.7 days of 117.5 that the GPU hours were
FT-HSDP     Salpekar et al. 2026 (2602.00277), abstract: about 100,000 GPUs; a stall of 10 min becomes 3, effective time
            44 % becomes 80 %. The failure rate is not published: it is what 44 % and 10 min imply, and 80 % is then
            predicted
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from minidist.draw.table import aligned
from minidist.plan.failures.policies import Job, closed_form
from minidist.plan.failures.simulate import simulate

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0


@dataclass(frozen=True)
class Reported:
    """One run, or a part of it.

    Attributes
    ----------
    name, policy : str
    job : Job
    reported : tuple of float
        The least and the most that the share which trains was, as reported.
    assumed : str
        What of the job is not published.
    """

    name: str
    policy: str
    job: Job
    reported: tuple[float, float]
    assumed: str


def stops_of_ft_hsdp() -> float:
    """Return the seconds between two failures at which 10 minutes of restart leave 44 %: bisection."""
    least, most = 1 * MINUTE, 1 * DAY
    for _ in range(60):
        middle = (least + most) / 2
        job = Job(middle, step=10.0, write=5.0, restart=10 * MINUTE)
        least, most = (middle, most) if closed_form(job, "spare") < 0.44 else (least, middle)
    return least


def reported() -> list[Reported]:
    """Return the runs."""
    llama = Job(54 * DAY / 419, step=12.0, write=10.0, restart=10 * MINUTE)
    # 17 % of 33 days in 16 days, or without the holiday in 12; 29 % in 13; 44 % in 21, or 18.5
    opt = Job(16 * DAY / 40, step=16.0, write=2 * MINUTE, restart=1 * HOUR, every=1 * HOUR)
    bloom = Job(7 * DAY / 1.5, step=104.7, write=40.0, restart=30 * MINUTE, every=3 * HOUR)
    hsdp = Job(stops_of_ft_hsdp(), step=10.0, write=5.0, restart=10 * MINUTE)
    groups = replace(hsdp, stall=1.5 * MINUTE, replicas=48)
    alike = "a restart of 1 h, a checkpoint an hour that stops the run for 2 min"
    pool = replace(opt, mtbf=0.5 * DAY)
    return [
        Reported(
            "Llama 3 405B, 54 days",
            "spare",
            llama,
            (0.90, 1.0),
            "a restart of 10 min, 10 s of standing still for a checkpoint at Daly's cadence",
        ),
        Reported(
            "OPT-175B, until 3 December",
            "restart",
            replace(opt, repair=4 * HOUR),
            (0.17 * 33 / 16, 0.17 * 33 / 12),
            f"4 h until a machine is replaced, {alike}",
        ),
        Reported("OPT-175B, until 16 December", "spare", pool, (0.29 * 33 / 13,) * 2, alike),
        Reported(
            "OPT-175B, until 6 January", "spare", pool, (0.44 * 33 / 21, 0.44 * 33 / 18.5), alike
        ),
        Reported(
            "BLOOM",
            "spare",
            bloom,
            (0.90, 1.0),
            "a restart of 30 min, after which the spare nodes work",
        ),
        Reported(
            "100,000 GPUs, all restart",
            "spare",
            hsdp,
            (0.44, 0.44),
            f"a failure every {hsdp.mtbf / MINUTE:.1f} min, which these 44 % imply, with 5 s of standing "
            "still for a checkpoint at Daly's cadence",
        ),
        Reported(
            "the same, FT-HSDP",
            "quorum",
            groups,
            (0.80, 0.80),
            "48 replicas, steps of 10 s; the 3 min are half for leaving and half for coming back",
        ),
    ]


def table() -> str:
    """Return all of them, a row each, and what was assumed."""
    title = ("run", "policy", "reported", "closed form", "simulated")
    rows, notes = [], []
    for each in reported():
        low, high = each.reported
        said = f"{low:.0%}" if low == high else f"{low:.0%} to {high:.0%}"
        found = simulate(each.job, each.policy)
        share = closed_form(each.job, each.policy)
        rows.append((each.name, each.policy, said, f"{share:.1%}", f"{found.training:.1%}"))
        notes.append(f"{each.name}: assumed {each.assumed}")
    return "\n".join([aligned(title, rows), "", *notes])
