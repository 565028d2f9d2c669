"""What a run costs: days, money, energy, and what failures take.

GPU hours   GPUs x seconds of a step x steps
energy      GPU hours x watts x 1.59: what a cluster drew with everything around its GPUs (Luccioni et al. 2022: 433,196
            kWh by the GPUs of BLOOM's 1,082,990 hours, and 256,646 kWh beside them)
failures    one in 50,700 hours of a GPU (Grattafiori et al. 2024: 419 in 54 days of 16,384 GPUs), so one in 50,700/GPUs
            hours of a run; checkpoints at Daly's cadence (`trainer.checkpoint.cadence`); how the run goes on:
            `failures/policies.py`
"""

from dataclasses import asdict

from minidist.plan.device import PlanError
from minidist.plan.failures.policies import POLICIES, Job, closed_form
from minidist.plan.failures.simulate import simulate
from minidist.plan.memory import MOMENTS
from minidist.plan.search import Found

HOUR, DAY = 3600.0, 86400.0
BESIDE = 1.59  # kWh of a cluster for each of its GPUs: (433,196 + 256,646) / 433,196
GPU_MTBF = 16384 * 54 * 24 / 419  # hours between two failures of one GPU and what belongs to it
# bytes/s of a host into the file system: BLOOM's 2.3 TB in 40 s from 48 nodes
WRITTEN = 2.3e12 / 40 / 48
STATE = 6  # bytes a parameter in a checkpoint beside its moments: 16-bit weights, masters
LEAST = 1e-3  # of the time that has to be left for training
RESTART = 900.0  # seconds until a job computes again: noticed, replaced, loaded
NOTICED = 30.0  # seconds until ranks that go on have noticed that one is lost, and regrouped
REPAIR = 4.0  # hours until there is a machine in place of a lost one; not published by anybody
DRAWN = 5_000  # failures, of a simulation


def job_of(found: Found, mtbf_hours: float = 0.0, repair_hours: float = REPAIR) -> Job:
    """Return a layout's run as failures see it: its step, its checkpoint, and how long it takes to
    come back.

    A peer sends what a checkpoint holds of one replica, all of its GPUs at once.
    """
    run = found.run
    gpus = run.machine.total
    state = run.model.parameters * (STATE + MOMENTS[run.optimizer])
    card = run.machine.across / run.machine.node
    return Job(
        mtbf=(mtbf_hours or GPU_MTBF / gpus) * HOUR,
        step=found.seconds,
        write=state / (WRITTEN * max(1, gpus // run.machine.hosted)),
        restart=RESTART,
        stall=NOTICED + state * run.dp / gpus / card,
        repair=repair_hours * HOUR,
        replicas=run.dp,
    )


def goodput(job: Job) -> dict[str, dict[str, float]]:
    """Return by policy where the time goes, by simulation, and beside it the closed form."""
    return {
        policy: {
            **asdict(simulate(job, policy, failures=DRAWN)),
            "closed_form": closed_form(job, policy),
        }
        for policy in POLICIES
    }


def cost(
    found: Found,
    tokens: float,
    price: float | None,
    grid: float,
    mtbf_hours: float = 0.0,
    policy: str = "spare",
    repair_hours: float = REPAIR,
) -> dict[str, float]:
    """Return the cost of training on `tokens`, at `price` $ a GPU hour (None: each site's) and
    `grid` g CO2 a kWh.

    `mtbf_hours` lie between two failures of the whole job (0: from the number of GPUs). `days` count
    checkpoints, failures and restarts, `undisturbed` does not. `writing` and `lost` are shares of
    the time. `every` is the seconds between two checkpoints, `write` the seconds of one. `co2` is in
    tons. What is lost depends on the `policy`.
    """
    run, job = found.run, job_of(found, mtbf_hours, repair_hours)
    gpus = run.machine.total
    steps = -(-int(tokens) // (run.batch * run.sequence))
    training = closed_form(job, policy)
    if training < LEAST:
        raise PlanError(
            f"a failure every {job.mtbf / HOUR:,.2g} h leaves no time to train with --policy "
            f"{policy}, as a checkpoint takes {job.write:,.0f} s and a restart {RESTART:.0f} s: use "
            "fewer GPUs, or say --mtbf"
        )
    saves = policy in ("restart", "spare")  # the others hold what is needed in memory
    writing = training * job.write / job.cadence if saves else 0.0
    seconds = steps * found.seconds / training
    hours = gpus * seconds / HOUR
    sites = run.machine.sites
    money = (
        hours / gpus * sum(site.gpus * (site.price if price is None else price) for site in sites)
    )
    kwh = hours / gpus * sum(site.gpus * site.device.watts for site in sites) / 1000 * BESIDE
    days = {"days": seconds / DAY, "undisturbed": steps * found.seconds / DAY}
    losses = {
        "mtbf_hours": job.mtbf / HOUR,
        "every": job.cadence,
        "write": job.write,
        "writing": writing,
        "lost": 1 - training - writing,
    }
    return (
        days
        | losses
        | {"steps": steps, "gpu_hours": hours, "money": money, "kwh": kwh, "co2": kwh * grid / 1e6}
    )
