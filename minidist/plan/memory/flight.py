"""Of how many layers and microbatches a rank of a pipeline holds activations at once, by schedule."""

from minidist.full.pipeline.schedules import V_SHAPED
from minidist.plan.run import Setup


def in_flight(run: Setup, stage: int) -> float:
    """Return the most layers whose activations a rank holds at once, each as often as microbatches
    are in flight through it: as the schedules' papers have it.
    """
    m = run.microbatches
    p = run.pp
    v = run.chunks
    layers = run.layers()[stage]
    if run.schedule == "gpipe":
        return m * layers
    if p == 1:
        return layers
    if run.schedule.startswith(("zb-2p", "zb-h2")):
        most = 2 * p - 1
        return min(m, most) * layers
    if run.schedule in V_SHAPED:
        return in_flight_of_v(run, stage)
    if run.schedule == "zb1p":
        most = p * v - stage
        return min(m * v, most) * longest(run, stage)
    if run.schedule.startswith("zb"):
        return min(m, p) * layers
    if v == 1:
        return min(m, p - stage) * layers
    # interleaved: p microbatches of each chunk in turn, until the first backward
    later = p - stage - 1
    most = 2 * later + (v - 1) * p + 1
    warm_up = min(m * v, most)
    rounds, left = divmod(warm_up, p * v)
    stages = run.stages()
    found = 0.0
    for chunk in range(v):
        of_round = left - chunk * p
        in_turn = rounds * p + min(p, max(0, of_round))
        found += in_turn * stages[chunk * p + stage]
    return found


def in_flight_of_v(run: Setup, rank: int) -> float:
    """Return the same for a V: a rank has the longer on its way down, the later that comes back up.

    zb-v lets go of one way's microbatch before it takes the other's.
    """
    m = run.microbatches
    stages = run.stages()
    on_way_down, on_way_up = stages[rank], stages[-1 - rank]
    down = 2 * run.pp - rank
    up = rank + 1
    if run.schedule == "dualpipe-v":
        return min(m, down) * on_way_down + min(m, up) * on_way_up
    before = min(m, down) * on_way_down + min(m, up - 1) * on_way_up
    after = min(m, down - 1) * on_way_down + min(m, up) * on_way_up
    return max(before, after)


def longest(run: Setup, stage: int) -> float:
    """Return the layers of the longest stage of the plan that a rank has."""
    found = []
    for rank, layers in zip(run.rank_of, run.stages(), strict=True):
        if rank == stage:
            found.append(layers)
    return max(found)


def deferred(run: Setup, stage: int) -> float:
    """Return how many layers wait for their weight gradients at once, beside those in flight.

    What a layer still keeps for them is less than it kept before; but if all of that was recomputed,
    nothing was kept before.
    """
    if run.recompute != "full" or run.schedule not in ("zb-h1", "zb1p", *V_SHAPED):
        return 0.0
    waiting = 2 * stage + 1 if run.schedule == "zb-v" else stage + 1
    return min(run.stages_a_rank * run.microbatches, waiting) * longest(run, stage)
