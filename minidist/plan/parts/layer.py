"""How long one layer of a microbatch takes on a rank, by kind: computing, recomputing, and what stands
in its way along each axis.

    tensor       collectives of a layer stand in its way (pipelined products hide `hidden_tensor` of them)
    context      keys and values hide behind the attention they are for
    expert       tokens go to their experts and come back
    sharding     ZeRO-3: gathers hide behind the layer before; computing beside them takes `stolen` of them longer
"""

from math import ceil
from typing import TypeAlias

from minidist.plan.compute.layer import Layer, layer
from minidist.plan.links import Group
from minidist.plan.memory import Parts
from minidist.plan.run import Setup, once
from minidist.plan.stages import Pass
from minidist.plan.traffic import tokens_seen

Seconds: TypeAlias = dict[str, float]


@once
def passes(run: Setup) -> tuple[Pass, Pass]:
    """Return a layer's forward and its backward."""
    one = layer(run.share)
    factor = run.known[run.software.factor]
    full = run.recompute == "full"
    reducing, reducing_again = tensor(run)
    waiting, waiting_back = context(run, one)
    exchanging = experts(run)
    if run.model.experts:
        exchanging += run.known[run.software.host_experts]
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
    launching = launched(run)
    launching_back = launching * (3 if full else 2)
    seconds = max(sum(forward.values()), launching)
    seconds_back = max(sum(backward.values()), launching_back)
    if run.zero == 3:
        gathering = gather(run, run.parts, run.kept_width)
        gathering_again = gathering * (2 if run.software.regather and full else 1)
        scattering = gather(run, run.parts, run.gradients)
        seconds = beside(run, seconds, gathering)
        seconds_back = beside(run, seconds_back, gathering_again + scattering)
    return Pass(forward, seconds), Pass(backward, seconds_back)


def launched(run: Setup) -> float:
    """Return the seconds in which a host launches one pass through a layer; without CUDA graphs those
    with experts take longer, by each expert that the rank has.
    """
    seconds = run.known["host"]
    software, model = run.software, run.model
    if model.experts and software.host_expert != "none":
        seconds += run.known[software.host_experts]
        seconds += run.known[software.host_expert] * run.own_experts / model.expert
    return seconds


def recomputed(run: Setup, one: Layer) -> float:
    """Return the seconds that a layer's backward spends on what was not kept."""
    forward = one.forward + one.attention
    if run.software.early_stop:
        forward -= one.last
    again = {
        "parts": one.parts,
        "selective": one.attention,
        "op": one.forward - one.products / 2,
        "half": forward / 2,
        "full": forward,
    }
    if run.software.compiler:  # which keeps what products return
        again["none"] = one.attention + one.parts
    return again.get(run.recompute, 0.0)


def tensor(run: Setup) -> tuple[float, float]:
    """Return the seconds of a layer's all-reduces along tp in each direction, and of those that
    recomputing repeats.
    """
    all_reduces = 1 if run.model.parallel else 2
    group = run.group("tp")
    if run.sp:  # in two halves: an all-gather and a reduce-scatter
        reducing = 2 * all_reduces * run.network.gather(run.reduced, group)
    else:
        reducing = all_reduces * run.network.all_reduce(run.reduced, group)
    if run.hidden_tensor or run.software.hides_tensor:
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
    if run.cp_comm == "ulysses":
        # queries, keys and values change from a share of the tokens to one of the heads, and back
        channels = 2 * (model.heads + model.kv) * model.head_dim // run.tp
        sent = share.tokens * channels * share.width
        waiting = run.network.exchange(sent, run.group("cp"))
        return waiting, waiting
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
    """Return the seconds in which a layer's tokens go to their experts and come back, and that
    nothing hides.
    """
    if not run.model.experts:
        return 0.0
    # ranks along ep are neighbours on the data axes, of which cp is the inner one; those along tp
    # share out the experts, too
    inner = "cp" if run.cp > 1 else "dp"
    near = run.group(inner).stride // run.tp
    group = Group(run.ep * run.tp, max(1, near))
    tokens = run.entry / run.tp
    together = group.together(run.machine)
    nodes = group.ranks // together
    if nodes > 1 and run.software.once_a_node:
        seconds = across_nodes(run, tokens, together, nodes)
    else:
        seconds = run.network.exchange(tokens * run.model.top_k, group)
    if run.software.hides_experts:
        seconds *= 1 - run.known["hidden_experts"]
    return 2 * seconds


def across_nodes(run: Setup, tokens: float, together: int, nodes: int) -> float:
    """Return the seconds of an exchange that sends a token to a node once, however many of its
    experts are there, and hands it out inside.

    A token that chooses its experts evenly has some on n (1 - (1 - 1/n)^k) of n nodes, and if they are
    limited to some groups, on no more nodes than those are on. Both ways of sending run side by side.
    (DeepSeek-V3, 2024, sections 2.1.2 and 3.2.2.)
    """
    model, top_k = run.model, run.model.top_k
    reached = nodes * (1 - (1 - 1 / nodes) ** top_k)
    if model.top_groups:
        reached = min(reached, ceil(nodes * model.top_groups / model.groups))
    remote = reached * (1 - 1 / nodes)
    across = tokens * remote / run.network.card() + run.known["tree"]
    inside = run.network.exchange(tokens * top_k, Group(together))
    return max(across, inside)


def beside(run: Setup, computing: float, collective: float) -> float:
    """Return the seconds of computing and of a collective beside it.

    The longer of the two counts; while both run, the collective slows computing down.
    """
    together = min(computing, collective)
    slowed = run.known[run.software.stolen] * together
    return max(computing + slowed, collective)


def gather(run: Setup, parts: Parts, width: int) -> float:
    """Return the seconds that all-gathers, or reduce-scatters, of these parameters take, of `width`
    bytes each.
    """
    seconds = 0.0
    for count, same in parts:
        seconds += run.network.gather(count * width, same)
    return seconds
