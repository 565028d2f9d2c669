"""What a run costs: days, money, energy, and what failures take.

GPU hours   GPUs x seconds of a step x steps
energy      GPU hours x watts x 1.59: what a cluster drew with everything around its GPUs (Luccioni et al. 2022: 433,196
            kWh by the GPUs of BLOOM's 1,082,990 hours, and 256,646 kWh beside them)
failures    one in 50,700 hours of a GPU (Grattafiori et al. 2024: 419 in 54 days of 16,384 GPUs), so one in 50,700/GPUs
            hours of a run; checkpoints at Daly's cadence (`trainer.checkpoint.cadence`)
"""

from minidist.plan.device import PlanError
from minidist.plan.search import Found
from minidist.trainer.checkpoint.cadence import daly, shares

HOUR, DAY = 3600.0, 86400.0
BESIDE = 1.59  # kWh of a cluster for each of its GPUs: (433,196 + 256,646) / 433,196
GPU_MTBF = 16384 * 54 * 24 / 419  # hours between two failures of one GPU and what belongs to it
# bytes/s of a node into the file system: BLOOM's 2.3 TB in 40 s from 48 nodes
WRITTEN = 2.3e12 / 40 / 48
STATE = 14  # bytes a parameter in a checkpoint: 16-bit weights, masters, two moments
# GPU hours of whole published runs beside those that are planned for them: `runs.toml`
LONGER = (1.2, 1.8)
LEAST = 1e-3  # of the time that has to be left for training
RESTART = 900.0  # seconds until a job computes again: noticed, replaced, loaded


def cost(
    found: Found, tokens: float, price: float | None, grid: float, mtbf_hours: float = 0.0
) -> dict[str, float]:
    """Return the cost of training on `tokens`, at `price` $ a GPU hour (None: each site's) and
    `grid` g CO2 a kWh.

    `mtbf_hours` lie between two failures of the whole job (0: from the number of GPUs). `days` count
    checkpoints, failures and restarts, `undisturbed` does not. `writing` and `lost` are shares of
    the time. `every` is the seconds between two checkpoints, `write` the seconds of one. `co2` is in
    tons.
    """
    run = found.run
    gpus = run.machine.total
    steps = -(-int(tokens) // (run.batch * run.sequence))
    mtbf = (mtbf_hours or GPU_MTBF / gpus) * HOUR
    write = run.model.parameters * STATE / (WRITTEN * max(1, gpus // run.machine.node))
    every = daly(write, mtbf)
    share = shares(every, write, mtbf, RESTART)
    if share.training < LEAST:
        raise PlanError(
            f"a failure every {mtbf / HOUR:,.2g} h leaves no time to train, as a checkpoint takes "
            f"{write:,.0f} s and a restart {RESTART:.0f} s: use fewer GPUs, or say --mtbf"
        )
    seconds = steps * found.seconds / share.training
    hours = gpus * seconds / HOUR
    sites = run.machine.sites
    money = (
        hours / gpus * sum(site.gpus * (site.price if price is None else price) for site in sites)
    )
    kwh = hours / gpus * sum(site.gpus * site.device.watts for site in sites) / 1000 * BESIDE
    days = {"days": seconds / DAY, "undisturbed": steps * found.seconds / DAY}
    losses = {
        "mtbf_hours": mtbf / HOUR,
        "every": every,
        "write": write,
        "writing": share.writing,
        "lost": share.lost,
    }
    return (
        days
        | losses
        | {"steps": steps, "gpu_hours": hours, "money": money, "kwh": kwh, "co2": kwh * grid / 1e6}
    )
