"""How long a step takes, and where it goes: computing, recomputing, what is exposed along each
axis, the bubble.

    layer        compute.py, times the factor of the software; never less than a host needs to launch it
    tensor       collectives of a layer stand in its way (pipelined products hide `hidden_tensor` of them)
    context      keys and values hide behind the attention they are for
    sharding     ZeRO-3: gathers hide behind the layer before; computing beside them takes `stolen` of them longer
    pipeline     messages that wait; bubble: the package's own plans on a clock, or the same in closed form
    data         what is left of the gradients' reduction behind the last backward; all of it without overlap

(Narayanan et al. 2021, sections 2 and 3; Korthikanti et al. 2022, section 4; Rajbhandari et al.
2020, section 7.)
"""

from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from minidist.parallel.pipeline.schedules import plan as pipeline_plan
from minidist.parallel.pipeline.simulate import simulate
from minidist.plan import links
from minidist.plan.compute import Layer, head, layer
from minidist.plan.links import Group
from minidist.plan.run import Setup

# of the package; others are known in closed form alone
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
Seconds = dict[str, float]


class Pass(NamedTuple):
    """A layer and a microbatch, forward or backward: seconds by kind, and the whole, with what
    hides behind it.
    """

    kinds: Seconds
    whole: float


def recomputed(run: Setup, one: Layer) -> float:
    """Return the seconds that a layer's backward spends on what was not kept."""
    whole = one.forward + one.attention - (one.last if run.software.early_stop else 0.0)
    again = {
        "selective": one.attention,
        "op": one.forward - one.products / 2,
        "half": whole / 2,
        "full": whole,
    }
    return again.get(run.recompute, 0.0)


@cache
def passes(run: Setup) -> tuple[Pass, Pass]:
    """Return a layer's forward and its backward."""
    known, machine, model, share = run.known, run.machine, run.model, run.share
    one, factor, full = layer(share), known[run.software.factor], run.recompute == "full"
    reduce = (1 if model.parallel else 2) * links.all_reduce(
        run.entry, run.group("tp"), machine, known
    )
    reduce *= 1 - known["hidden_tensor"] if run.hidden_tensor else 1
    # of the collectives of a layer
    to_last = (0.75 if run.sp else 0.5) if run.software.early_stop else 1.0
    reduce_again = reduce * {"full": to_last, "op": 0.5, "half": 0.5}.get(run.recompute, 0.0)
    keys = share.tokens * 2 * model.kv * model.head_dim // run.tp * share.width
    hop = links.send(keys, run.group("cp"), machine, known) * (run.cp - 1) if run.cp > 1 else 0.0
    # their gradients, in 32 bits, also go home
    back = hop * (1 + 4 / share.width * run.cp / max(1, run.cp - 1))
    late, late_back = max(0.0, hop - one.attention), max(0.0, back - one.attention_back)
    near = run.group("cp" if run.cp > 1 else "dp").stride
    routed = 2 * links.exchange(
        run.entry * model.top_k / run.tp, Group(run.ep, near), machine, known
    )
    forward = {
        "computing": factor * (one.forward + one.attention),
        "tensor": reduce,
        "context": late,
        "expert": routed,
    }
    backward = {
        "computing": factor * (one.backward + one.attention_back),
        "recomputing": factor * recomputed(run, one),
        "tensor": reduce + reduce_again,
        "context": late_back + (late if full else 0.0),
        "expert": routed * (2 if full else 1),
    }
    whole = max(sum(forward.values()), known["host"])
    whole_back = max(sum(backward.values()), known["host"] * (3 if full else 2))
    if run.zero == 3:
        gathered = sum(
            links.gather(count * share.width, same, machine, known) for count, same in run.parts
        )
        scattered = sum(
            links.gather(count * run.gradients, same, machine, known) for count, same in run.parts
        )
        scattered /= run.reductions
        again = gathered * (2 if run.software.regather and full else 1)
        whole, whole_back = beside(run, whole, gathered), beside(run, whole_back, again + scattered)
    return Pass(forward, whole), Pass(backward, whole_back)


def beside(run: Setup, computing: float, talking: float) -> float:
    """Return how long computing takes with a collective beside it: the longer, and what the
    collective takes away.
    """
    return max(computing + run.known[run.software.stolen] * min(computing, talking), talking)


def step(run: Setup, exact: bool = False) -> Seconds:
    """Return where the seconds of a step go: on the slowest stage, with the bubble that the others
    leave it.

    `exact` runs the schedule's plan on a clock; otherwise its closed form counts, which is within 2
    % and much faster.
    """
    known, machine, model, share = run.known, run.machine, run.model, run.share
    pp, m = run.pp, run.microbatches
    both = [
        passes(replace(run, machine=run.site(i))) if machine.slower else passes(run)
        for i in range(pp)
    ]
    # of the embedding, and of the head's input
    join = links.all_reduce(run.entry, run.group("tp"), machine, known)
    ends, joined = [0.0] * pp, [0.0] * pp
    ends[0] += share.streamed(4 * share.tokens * model.hidden)
    ends[-1] += head(replace(share, device=run.site(pp - 1).device), run.software.loss)
    joined[0] += join
    joined[-1] += join
    layers = run.layers()
    stages = [
        layers[i] * (both[i][0].whole + both[i][1].whole) + ends[i] + joined[i] for i in range(pp)
    ]
    slow = max(range(pp), key=lambda i: stages[i])
    forward, backward = both[slow]
    sent, bubble = between_stages(run) if pp > 1 else 0.0, 0.0
    waits = 2 * sent * run.chunks if run.software.sends_wait else 0.0
    if pp > 1:
        exact = exact and run.schedule in SCHEDULES
        bubble = (
            simulated(run, stages, forward, backward, sent, waits)
            if exact
            else filling(run, stages, backward, sent)
        )
    kinds = {
        name: m * layers[slow] * (forward.kinds.get(name, 0.0) + each)
        for name, each in backward.kinds.items()
    }
    kinds["computing"] += m * ends[slow]
    kinds["tensor"] += m * joined[slow]
    # for gathers, or for the host to launch small layers
    waited = m * stages[slow] - sum(kinds.values())
    kinds |= (
        {"sharding": waited, "host": 0.0} if run.zero == 3 else {"sharding": 0.0, "host": waited}
    )
    kinds |= {"pipeline": m * waits, "bubble": bubble}
    kinds["data"] = reduction(
        run, layers[slow], layers[slow] * forward.whole, layers[slow] * backward.whole
    )
    table = model.vocabulary * model.hidden / run.tp
    owned = sum(
        held / (same.ranks if run.zero else 1) for held, same in shared(run, layers[slow], table)
    )
    offloaded = (
        owned * (run.gradients + 2 + known["optimizer_bytes"]) / known["host_link"]
        if run.offload
        else 0.0
    )
    kinds["optimizer"] = share.streamed(known["optimizer_bytes"] * owned) + offloaded
    return kinds | {
        "input": m * 16 * share.tokens / known["host_link"],
        "other": known["synchronize"],
    }


def between_stages(run: Setup) -> float:
    """Return the seconds in which a microbatch's activations go from a stage to the next."""
    sent = links.send(run.entry / run.tp, run.group("pp"), run.machine, run.known)
    sent += links.gather(run.entry, run.group("tp"), run.machine, run.known)
    thin = run.entry * run.dp * run.cp / run.machine.thin if run.machine.slower else 0.0
    return max(sent, thin)


def filling(run: Setup, stages: list[float], backward: Pass, sent: float) -> float:
    """Return the seconds in which the slowest stage waits, in closed form: for the others, once a
    step.
    """
    share = 1 / run.chunks
    # F + I - W of F + I + W, where W is half of the backward's computing
    if run.schedule in ("zb-1p", "zb-h1"):
        share = 1 - backward.kinds["computing"] * max(run.layers()) / max(stages)
    elif run.schedule.startswith(("zb-2p", "zb-h2", "zb-v")):
        share = 0.02
    return (sum(stages) - max(stages)) * share + 2 * (run.pp - 1) * sent


def simulated(
    run: Setup, stages: list[float], forward: Pass, backward: Pass, sent: float, waits: float
) -> float:
    """Return the same from the schedule's plan on a clock. Its steady part is cut short: it repeats
    itself.
    """
    m = min(run.microbatches, 4 * run.pp)
    plan = pipeline_plan(run.schedule, run.pp, m, run.chunks)
    each = [
        (stages[plan.rank_of[stage]] + waits) * run.pp / plan.stages for stage in range(plan.stages)
    ]
    ahead = forward.whole / (forward.whole + backward.whole)
    half = [(1 - ahead) / 2 * seconds for seconds in each]
    whole = [(1 - ahead) * seconds for seconds in each]
    clock = simulate(plan, [ahead * seconds for seconds in each], whole, half, half, latency=sent)
    return clock.length - m * (max(stages) + waits)


def reduction(run: Setup, layers: float, forward: float, backward: float) -> float:
    """Return the seconds of joining gradients, and of gathering what ZeRO shards, that no computing
    hides.

    `forward` and `backward` are the seconds of a microbatch in the `layers` of a stage. The
    gradients of the embedding come last, when nothing is left to hide behind; so do those of ZeRO
    3's first layer, whose parameters, gathered before anything is computed, hide behind nothing
    either.
    """
    model, m, width, gradient = run.model, run.microbatches, run.software.width, run.gradients
    table = model.vocabulary * model.hidden / run.tp
    ends = table * (1 if model.tied or run.pp > 1 else 2)
    held, hides = shared(run, layers, ends), backward
    gather = partial(links.gather, machine=run.machine, known=run.known)
    reduce = partial(links.all_reduce, machine=run.machine, known=run.known)
    if run.zero == 3:
        shards = run.sharded.ranks
        replicas = Group(run.dp * run.cp // shards, run.tp * shards)
        shown = sum(gather(some * width, same) for some, same in shared(run, m, ends))
        shown += sum(gather(some * gradient, same) for some, same in shared(run, 1, ends))
        talking = sum(reduce(some * gradient / same.ranks, replicas) for some, same in held)
    elif run.zero:
        each = m / run.reductions if run.zero == 2 and run.pp == 1 else 1
        shown = gather(table * gradient, run.sharded)
        talking = each * sum(gather(some * gradient, same) for some, same in held) - shown
        hides = each * backward
        gathered = sum(gather(some * width, same) for some, same in held)
        shown += max(0.0, gathered - forward * run.software.gathers_ahead)
    else:
        shown = reduce(table * gradient, run.sharded)
        talking = sum(reduce(some * gradient, same) for some, same in held) - shown
    hidden = min(talking, hides) if run.software.overlap else 0.0
    return shown + talking - hidden + run.known[run.software.stolen] * hidden


def shared(run: Setup, layers: float, ends: float) -> list[tuple[float, Group]]:
    """Return the parameters of so many layers and of the ends on this rank, each with the ranks
    that hold the same.
    """
    return [
        (layers * count + (0 if place else ends), same)
        for place, (count, same) in enumerate(run.parts)
    ]
