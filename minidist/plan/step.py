"""How long a step takes, and where it goes: computing, recomputing, what is exposed along each
axis, the bubble.

    layer        compute.py, times the factor of the software; never less than a host needs to launch it
    tensor       collectives of a layer stand in its way (pipelined products hide `hidden_tensor` of them)
    context      keys and values hide behind the attention they are for
    sharding     ZeRO-3: gathers hide behind the layer before; computing beside them takes `stolen` of them longer
    pipeline     messages that wait; bubble: the package's own plans on a clock, or the same in closed form
    data         what is left of the gradients' reduction behind the last backward; all of it without overlap

`passes` times one layer, `stages_of` the stages made of layers, `step` the whole.

(Narayanan et al. 2021, sections 2 and 3; Korthikanti et al. 2022, section 4; Rajbhandari et al.
2020, section 7.)
"""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from minidist.plan.compute import Layer, head, layer
from minidist.plan.links import Group
from minidist.plan.memory import Parts, ends_parameters, parts_of, table_parameters
from minidist.plan.run import Setup
from minidist.plan.stages import SCHEDULES, Pass, Stage, filling, simulated
from minidist.plan.traffic import tokens_seen

Seconds = dict[str, float]

# ---------------------------------------------------------------- a layer


@cache
def passes(run: Setup) -> tuple[Pass, Pass]:
    """Return a layer's forward and its backward."""
    one = layer(run.share)
    factor = run.known[run.software.factor]
    full = run.recompute == "full"
    reducing, reducing_again = tensor(run)
    waiting, waiting_back = context(run, one)
    exchanging = experts(run)
    forward = {
        "computing": factor * (one.forward + one.attention),
        "tensor": reducing,
        "context": waiting,
        "expert": exchanging,
    }
    backward = {
        "computing": factor * (one.backward + one.attention_back),
        "recomputing": factor * recomputed(run, one),
        "tensor": reducing + reducing_again,
        "context": waiting_back + (waiting if full else 0.0),
        "expert": exchanging * (2 if full else 1),
    }
    # The host has to launch it all: a forward, and in backward as much for each of two gradients.
    launching = run.known["host"]
    launching_back = launching * (3 if full else 2)
    seconds = max(sum(forward.values()), launching)
    seconds_back = max(sum(backward.values()), launching_back)
    if run.zero == 3:
        gathering = gather(run, run.parts, run.kept_width)
        gathering_again = gathering * (2 if run.software.regather and full else 1)
        scattering = gather(run, run.parts, run.gradients)
        scattering /= run.reductions
        seconds = beside(run, seconds, gathering)
        seconds_back = beside(run, seconds_back, gathering_again + scattering)
    return Pass(forward, seconds), Pass(backward, seconds_back)


def recomputed(run: Setup, one: Layer) -> float:
    """Return the seconds that a layer's backward spends on what was not kept."""
    forward = one.forward + one.attention
    if run.software.early_stop:
        forward -= one.last
    again = {
        "selective": one.attention,
        "op": one.forward - one.products / 2,
        "half": forward / 2,
        "full": forward,
    }
    return again.get(run.recompute, 0.0)


def tensor(run: Setup) -> tuple[float, float]:
    """Return the seconds of a layer's all-reduces along tp in each direction, and of those that
    recomputing repeats.
    """
    all_reduces = 1 if run.model.parallel else 2
    group = run.group("tp")
    reducing = all_reduces * run.network.all_reduce(run.reduced, group)
    if run.hidden_tensor:
        reducing *= 1 - run.known["hidden_tensor"]
    # Recomputing may stop before the last collective of a layer: with sp the last of four.
    until_stop = 1.0
    if run.software.early_stop:
        until_stop = 0.75 if run.sp else 0.5
    repeated = {"full": until_stop, "op": 0.5, "half": 0.5}
    return reducing, reducing * repeated.get(run.recompute, 0.0)


def context(run: Setup, one: Layer) -> tuple[float, float]:
    """Return for how many seconds attention waits for keys and values along cp, forward and
    backward.
    """
    if run.cp == 1:
        return 0.0, 0.0
    share, model = run.share, run.model
    keys = share.tokens * 2 * model.kv * model.head_dim // run.tp
    hops = run.cp - 1
    # backward their gradients circle, too: in 32 bits, and one hop more, home
    gradients = 4 / share.width * run.cp / hops
    if 0 < model.window < run.sequence:
        # directly to the ranks that see them, and gradients directly home
        keys = int(keys * tokens_seen(run.cp, run.sequence, model.window) / run.sequence)
        hops = 1
        gradients = 4 / share.width
    circling = hops * run.network.send(keys * share.width, run.group("cp"))
    circling_back = circling * (1 + gradients)
    waiting = max(0.0, circling - one.attention)
    waiting_back = max(0.0, circling_back - one.attention_back)
    return waiting, waiting_back


def experts(run: Setup) -> float:
    """Return the seconds in which a layer's tokens go to their experts and come back."""
    # ranks along ep are neighbours on the data axes, of which cp is the inner one
    inner = "cp" if run.cp > 1 else "dp"
    group = Group(run.ep, run.group(inner).stride)
    rows = run.entry * run.model.top_k / run.tp
    return 2 * run.network.exchange(rows, group)


def gather(run: Setup, parts: Parts, width: int) -> float:
    """Return the seconds that all-gathers, or reduce-scatters, of these parameters take, of `width`
    bytes each.
    """
    seconds = 0.0
    for count, same in parts:
        seconds += run.network.gather(count * width, same)
    return seconds


def all_reduce(run: Setup, parts: Parts, width: int) -> float:
    """Return the seconds that all-reduces of these parameters take, of `width` bytes each."""
    seconds = 0.0
    for count, same in parts:
        seconds += run.network.all_reduce(count * width, same)
    return seconds


def beside(run: Setup, computing: float, collective: float) -> float:
    """Return the seconds of computing and of a collective beside it.

    The longer of the two counts; while both run, the collective slows computing down.
    """
    together = min(computing, collective)
    slowed = run.known[run.software.stolen] * together
    return max(computing + slowed, collective)


# ---------------------------------------------------------------- a step


def step(run: Setup, exact: bool = False) -> Seconds:
    """Return where the seconds of a step go: on the slowest stage, with the bubble that the others
    leave it.

    `exact` runs the schedule's plan on a clock. The closed form, which counts otherwise, is within
    2 % of it and much faster.
    """
    known, m = run.known, run.microbatches
    stages = stages_of(run)
    slowest = max(stages, key=lambda stage: stage.seconds)
    forward, backward = slowest.forward, slowest.backward
    seconds = {}
    for kind, of_backward in backward.kinds.items():
        of_layer = forward.kinds.get(kind, 0.0) + of_backward
        seconds[kind] = m * slowest.layers * of_layer
    seconds["computing"] += m * slowest.ends
    seconds["tensor"] += m * slowest.joined
    # What is left was waiting: for ZeRO-3's gathers, or for the host to launch small layers.
    waited = m * slowest.seconds - sum(seconds.values())
    seconds["sharding"] = waited if run.zero == 3 else 0.0
    seconds["host"] = 0.0 if run.zero == 3 else waited
    # Now the other stages ...
    sending = between_stages(run) if run.pp > 1 else 0.0
    waits = 2 * sending * run.stages_a_rank if run.software.sends_wait else 0.0
    seconds["pipeline"] = m * waits
    seconds["bubble"] = 0.0
    if run.pp > 1 and exact and run.schedule in SCHEDULES:
        seconds["bubble"] = simulated(run, stages, sending, waits)
    elif run.pp > 1:
        seconds["bubble"] = filling(run, stages, sending)
    # ... and the other replicas.
    seconds["data"] = reduction(run, slowest)
    seconds["optimizer"] = optimizer(run, slowest.layers)
    input = m * 16 * run.share.tokens
    seconds["input"] = input / known["host_link"]
    seconds["other"] = known["synchronize"]
    return seconds


def stages_of(run: Setup) -> list[Stage]:
    """Return the stages of a run, in order."""
    share, last_rank = run.share, run.rank_of[-1]
    embedding = share.streamed(4 * share.tokens * run.model.hidden)
    joining = run.network.all_reduce(run.entry, run.group("tp"))
    of_fast = passes(run)
    found = []
    for rank, layers in enumerate(run.layers()):
        site = run.site(rank)
        forward, backward = passes(replace(run, machine=site)) if run.machine.slower else of_fast
        first = last = 0.0
        if rank == 0:
            first = embedding
        if rank == last_rank:
            of_last = replace(share, device=site.device)
            last = head(of_last, run.software.loss)
        joined = joining * ((rank == 0) + (rank == last_rank))
        found.append(Stage(layers, forward, backward, first, last, joined))
    return found


def optimizer(run: Setup, layers: float) -> float:
    """Return the seconds of the optimizer's step on a stage of so many layers and a table."""
    known = run.known
    parameters = 0.0
    for count, same in parts_of(run, layers, table_parameters(run)):
        parameters += count / (same.ranks if run.zero else 1)
    seconds = run.share.streamed(known["optimizer_bytes"] * parameters)
    if run.offload:
        moved = run.gradients + 2 + known["optimizer_bytes"]
        seconds += parameters * moved / known["host_link"]
    return seconds


# ---------------------------------------------------------------- along the pipeline


def between_stages(run: Setup) -> float:
    """Return the seconds in which a microbatch's activations go from a stage to the next."""
    sending = run.network.send(run.entry / run.tp, run.group("pp"))
    # each rank along tp has sent its part, so the receivers gather
    sending += run.network.gather(run.entry, run.group("tp"))
    if not run.machine.slower:
        return sending
    of_all_replicas = run.entry * run.dp * run.cp
    return max(sending, of_all_replicas / run.machine.thin)


# ---------------------------------------------------------------- along the data axes


class Reduction(NamedTuple):
    """Seconds of a step's collectives along the data axes: those that nothing hides, those that
    `backward` hides, and how long that is.
    """

    exposed: float
    hideable: float
    backward: float


def reduction(run: Setup, stage: Stage) -> float:
    """Return the seconds that the data axes add to a step: collectives which no computing hides,
    and what the hidden ones take away from computing.
    """
    forward = stage.layers * stage.forward.seconds
    backward = stage.layers * stage.backward.seconds
    if run.zero == 3:
        exposed, hideable, behind = reduction_of_shards(run, stage.layers, backward)
    elif run.zero:
        exposed, hideable, behind = reduction_to_shards(run, stage.layers, forward, backward)
    else:
        exposed, hideable, behind = reduction_of_copies(run, stage.layers, backward)
    hidden = min(hideable, behind) if run.software.overlap else 0.0
    slowed = hidden * run.known[run.software.stolen]
    return exposed + hideable - hidden + slowed


def reduction_of_copies(run: Setup, layers: float, backward: float) -> Reduction:
    """Return what plain data parallelism sends: all gradients.

    Those of the embedding come last, when nothing is left to hide behind.
    """
    parts = parts_of(run, layers, ends_parameters(run))
    last = [(table_parameters(run), run.sharded)]
    exposed = all_reduce(run, last, run.gradients)
    hideable = all_reduce(run, parts, run.gradients) - exposed
    return Reduction(exposed, hideable, backward)


def reduction_to_shards(run: Setup, layers: float, forward: float, backward: float) -> Reduction:
    """Return what ZeRO 1 and 2 send: each rank receives the gradients of its shard, and the
    parameters of all others.
    """
    parts = parts_of(run, layers, ends_parameters(run))
    last = [(table_parameters(run), run.sharded)]
    # ZeRO 2 may reduce each microbatch's gradients.
    times = run.microbatches / run.reductions if run.zero == 2 else 1.0
    exposed = gather(run, last, run.gradients)
    hideable = times * gather(run, parts, run.gradients) - exposed
    gathering = gather(run, parts, run.kept_width)
    hidden = forward if run.software.gathers_ahead else 0.0
    exposed += max(0.0, gathering - hidden)
    return Reduction(exposed, hideable, times * backward)


def reduction_of_shards(run: Setup, layers: float, backward: float) -> Reduction:
    """Return what ZeRO 3 sends beside the gathers of `passes`.

    Nothing hides the first layer's parameters, which are gathered before anything is computed, or
    its gradients, which come last. If groups of ranks shard, their sums are all-reduced over the
    groups.
    """
    ends, shards = ends_parameters(run), run.sharded.ranks
    first_layers = parts_of(run, run.microbatches, ends)
    last_layer = parts_of(run, 1, ends)
    exposed = gather(run, first_layers, run.kept_width)
    exposed += gather(run, last_layer, run.gradients)
    groups = Group(run.dp * run.cp // shards, run.tp * shards)
    own = []
    for count, same in parts_of(run, layers, ends):
        own.append((count / same.ranks, groups))
    hideable = all_reduce(run, own, run.gradients)
    return Reduction(exposed, hideable, backward)
