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

from dataclasses import replace
from typing import Any

from minidist.plan.compute.layer import head
from minidist.plan.memory import MOMENTS, table_parameters
from minidist.plan.parts.data import reduction
from minidist.plan.parts.layer import Seconds, passes
from minidist.plan.parts.muon import muon
from minidist.plan.run import Setup, once
from minidist.plan.stages import SCHEDULES, Pass, Stage, filling, simulated


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
        waits = 2 * sending * run.stages_a_rank
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


def stages_of(run: Setup) -> list[Stage]:
    """Return the stages of a run, in order."""
    last = run.rank_of[-1]
    joining = run.network.all_reduce(run.entry, run.group("tp"))
    alike: dict[Any, Stage] = {}  # most stages of a long pipeline are
    found = []
    for rank, layers in enumerate(run.layers()):
        leading = run.leading_layers(rank)
        there = run
        if run.machine.slower:
            there = replace(run, machine=run.site(rank))
        kind = there.machine.name, layers, leading, rank == 0, rank == last
        if kind not in alike:
            alike[kind] = stage_of(there, rank, layers, leading, joining)
        found.append(alike[kind])
    return found


def stage_of(run: Setup, rank: int, layers: float, leading: float, joining: float) -> Stage:
    """Return the stage of a rank along pp, whose site the run has for all.

    `joining` are the seconds of an all-reduce along tp, of which each end has one.
    """
    forward, backward = passes_of(run)
    if leading:
        forward_leading, backward_leading = passes_of(run.leading)
        forward = mean_of(forward_leading, forward, leading / layers)
        backward = mean_of(backward_leading, backward, leading / layers)
    is_first, is_last = rank == 0, rank == run.rank_of[-1]
    first = last = 0.0
    if is_first:
        first = run.share.streamed(4 * run.share.tokens * run.model.hidden)
    if is_last:
        last = (1 + run.model.predicted) * head(run.share, run.software.loss)
    return Stage(
        layers=layers,
        leading=leading,
        forward=forward,
        backward=backward,
        first=first,
        last=last,
        joined=(is_first + is_last) * joining,
    )


@once
def passes_of(run: Setup) -> tuple[Pass, Pass]:
    """Return the passes of a run's mean layer, of which some may have no window."""
    forward, backward = passes(run)
    if not run.model.unwindowed:
        return forward, backward
    everything = replace(run, model=run.model.without_window)
    forward_of_all, backward_of_all = passes(everything)
    share = run.model.unwindowed / run.model.layers
    return mean_of(forward_of_all, forward, share), mean_of(backward_of_all, backward, share)


def mean_of(one: Pass, other: Pass, share: float) -> Pass:
    """Return the mean of two passes: a `share` of one, and the rest of the other."""
    kinds = {}
    for kind, seconds in one.kinds.items():
        kinds[kind] = share * seconds + (1 - share) * other.kinds[kind]
    return Pass(kinds, share * one.seconds + (1 - share) * other.seconds)


def optimizer(run: Setup, stage: Stage) -> float:
    """Return the seconds of the optimizer's step on a stage with a table."""
    known = run.known
    parameters = 0.0
    for count, same in stage.parameters(run, table_parameters(run)):
        parameters += count / same.ranks if run.zero else count
    # a moment that there is not is neither read nor written
    each = known["optimizer_bytes"] - 2 * (MOMENTS["adamw"] - MOMENTS[run.optimizer])
    seconds = run.share.streamed(each * parameters) + muon(run, stage)
    if run.offload:
        moved = run.gradients + 2 + each
        seconds += parameters * moved / known["host_link"]
    return seconds


def between_stages(run: Setup) -> float:
    """Return the seconds in which a microbatch's activations go from a stage to the next."""
    sending = run.network.send(run.entry / run.tp, run.group("pp"))
    # each rank along tp has sent its part, so the receivers gather
    sending += run.network.gather(run.entry, run.group("tp"))
    if not run.machine.slower:
        return sending
    of_all_replicas = run.entry * run.dp * run.cp
    return max(sending, of_all_replicas / run.machine.thin)
