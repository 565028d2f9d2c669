"""How long a step takes, and where it goes: computing, recomputing, what is exposed along each
axis, the bubble.

    layer        compute.py, times the factor of the software; never less than a host needs to launch it
    tensor       collectives of a layer stand in its way (pipelined products hide `hidden_tensor` of them)
    context      keys and values hide behind the attention they are for
    sharding     ZeRO-3: gathers hide behind the layer before; computing beside them takes `stolen` of them longer
    pipeline     messages that wait; bubble: the package's own plans on a clock, or the same in closed form
    data         what is left of the gradients' reduction behind the last backward; all of it without overlap

`parts/` times one layer, the stages made of layers, and what they and their replicas wait for; `step` the whole.

(Narayanan et al. 2021, sections 2 and 3; Korthikanti et al. 2022, section 4; Rajbhandari et al.
2020, section 7.)
"""

from minidist.plan.memory import table_parameters
from minidist.plan.parts.data import reduction
from minidist.plan.parts.layer import Seconds
from minidist.plan.parts.stages import Stage, between_stages, filling, simulated, stages_of
from minidist.plan.run import Setup

# of the package; others are known in closed form alone
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb1p", "zb-v")


def step(run: Setup, exact: bool = False) -> Seconds:
    """Return where the seconds of a step go: on the slowest stage, with the bubble that the others
    leave it.

    `exact` runs the schedule's plan on a clock. The closed form, which counts otherwise, is within
    2 % of it and much faster.
    """
    known, m = run.known, run.microbatches
    stages = stages_of(run)
    slowest = max(stages, key=lambda stage: stage.seconds)
    forward = slowest.forward
    backward = slowest.backward
    seconds = {}
    for kind, of_backward in backward.kinds.items():
        of_layer = forward.kinds.get(kind, 0.0) + of_backward
        seconds[kind] = m * slowest.layers * of_layer
    seconds["computing"] += m * slowest.ends
    seconds["tensor"] += m * slowest.joined
    # What is left was waiting: for ZeRO-3's gathers, or for the host to launch small layers.
    waited = m * slowest.seconds - sum(seconds.values())
    seconds["sharding"] = seconds["host"] = 0.0
    if run.zero == 3:
        seconds["sharding"] = waited
    else:
        seconds["host"] = waited
    # Now the other stages ...
    sending = waits = 0.0
    if run.pp > 1:
        sending = between_stages(run)
    if run.software.sends_wait:
        waits = 2 * sending * run.chunks
    seconds["pipeline"] = m * waits
    seconds["bubble"] = 0.0
    if run.pp > 1 and exact and run.schedule in SCHEDULES:
        seconds["bubble"] = simulated(run, stages, sending, waits)
    elif run.pp > 1:
        seconds["bubble"] = filling(run, stages, sending)
    # ... and the other replicas.
    seconds["data"] = reduction(run, slowest)
    seconds["optimizer"] = optimizer(run, slowest)
    tokens = m * run.share.tokens
    seconds["input"] = 16 * tokens / known["host_link"]
    seconds["other"] = known["synchronize"]
    return seconds


def optimizer(run: Setup, stage: Stage) -> float:
    """Return the seconds of the optimizer's step on a stage with a table."""
    known = run.known
    parameters = 0.0
    for count, same in stage.parameters(run, table_parameters(run)):
        parameters += count / same.ranks if run.zero else count
    seconds = run.share.streamed(known["optimizer_bytes"] * parameters)
    if run.offload:
        moved = run.gradients + 2 + known["optimizer_bytes"]
        seconds += parameters * moved / known["host_link"]
    return seconds
