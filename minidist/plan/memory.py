"""What a GPU holds at its peak, by category: on the stage of the pipeline that holds most.

The formulas are those of `equation.py` and its papers. Here they meet each stage, each schedule and
each software:

    parameters, gradients, optimizer   bytes a parameter. ZeRO divides them by the ranks that have the same parameters,
                   and experts have fewer copies than the rest; some frameworks keep a copy of their own
                   (autocast: 4 + 4 + 8 bytes, nothing in 16 bits beside)
    activations    what the microbatches in flight keep (1F1B: one for each later stage), and one layer at work
                   (autocast: 32 bits between products, and 16-bit copies of what these read: inputs and weights)
    logits         in 16 and 32 bits, where the head is
    communication  gathered layers
    resident       what the driver sees beside tensors: context, NCCL's buffers, fragmentation
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

from minidist.parallel.pipeline.schedules import V_SHAPED
from minidist.plan.equation import layer_activations
from minidist.plan.links import Group
from minidist.plan.run import Setup

GB = 1e9
Bytes = dict[str, float]
Parts: TypeAlias = Sequence[tuple[float, Group]]
"""Parameters on a rank, each with the ranks that have the same ones."""


# ---------------------------------------------------------------- which parameters a rank has


def table_parameters(run: Setup) -> float:
    """Return the parameters of the embedding, or of the head, on each rank along tp."""
    return run.model.vocabulary * run.model.hidden / run.tp


def ends_parameters(run: Setup) -> float:
    """Return the parameters of embedding and head on a rank whose stage has either."""
    on_one_rank = run.rank_of[-1] == 0 and not run.model.tied
    return table_parameters(run) * (2 if on_one_rank else 1)


def parts_of(run: Setup, layers: float, ends: float, leading: float = 0.0) -> Parts:
    """Return the parameters of so many layers and of the ends on this rank, each with the ranks
    that have the same ones. `leading` of the layers are dense ones.
    """
    (dense, same), *routed = run.parts
    alike = layers - leading
    of_leading = leading * run.leading.dense_layer if leading else 0.0
    parts = [(alike * dense + of_leading + ends, same)]
    for count, copies in routed:
        parts.append((alike * count, copies))
    return parts


# ---------------------------------------------------------------- what it holds


def bytes_held(run: Setup) -> Bytes:
    """Return the bytes by category of the fullest GPU at its peak."""
    # The first stage has the embedding and most microbatches, the last one the head. The second
    # can hold more than the first, whose embedding may count as a layer; so can the longest.
    last = run.pp - 1
    layers = run.layers()
    stages = {0, min(1, last), last, layers.index(max(layers))}
    found = [bytes_of_stage(run, stage) for stage in sorted(stages)]
    return max(found, key=lambda bytes: sum(bytes.values()))


def bytes_of_stage(run: Setup, stage: int) -> Bytes:
    """Return the bytes by category of a GPU of a stage at its peak."""
    model = run.model
    layers = math.ceil(run.layers()[stage])
    is_last = stage == run.rank_of[-1]
    has_own_head = is_last and not (model.tied and stage == 0)
    tables = (stage == 0) + has_own_head
    leading = math.ceil(run.leading_layers(stage))
    held = states(run, layers, tables, leading)
    weights, gradients, optimizer = held
    saved, working = activations(run)
    logits = 0.0
    if is_last and not run.fused_loss:
        columns = -(-model.vocabulary // run.tp)
        logits = run.share.tokens * columns * run.software.kept_logit
    copies = 0.0
    if run.autocast:
        of_layer = 2 * sum(count for count, _ in run.parts)
        if run.recompute == "full":
            working += of_layer
        else:
            saved += of_layer
        copies = 2 * table_parameters(run) if is_last else 0.0  # the head's
    kept = in_flight(run, stage) * saved + deferred(run, stage) * working
    outside = run.known["resident"] * GB if run.software.measured == "driver" else 0.0
    return {
        "parameters": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": kept + working + copies,
        "logits": logits,
        "communication": gathered(run) if run.zero == 3 else 0.0,
        "resident": outside,
    }


def states(run: Setup, layers: int, tables: int, leading: int = 0) -> tuple[float, float, float]:
    """Return the bytes of weights, gradients and optimizer of some layers, of which `leading` are
    dense, and of `tables` (embedding, head).
    """
    weights = gradients = optimizer = 0.0
    for count, same in parts_of(run, layers, tables * table_parameters(run), leading):
        each = state_bytes(run, same.ranks)
        weights += count * each[0]
        gradients += count * each[1]
        optimizer += count * each[2]
    return weights, gradients, optimizer


def state_bytes(run: Setup, ranks: int) -> tuple[float, float, float]:
    """Return bytes of weights, gradients and optimizer for one parameter, which ZeRO shards over
    `ranks`.

    (ZeRO, table 1, and the software's own copies.)
    """
    software, zero = run.software, run.zero
    if run.autocast:
        cuts = zero >= 2 and run.reductions == 1
        state = 0.0 if run.offload else 8 / (ranks if zero else 1)
        return 4 / (ranks if zero == 3 else 1), 4 / (ranks if cuts else 1), state
    if zero == 3 and not software.parameters:
        # The sharded masters are the parameters. A pipeline keeps the gathered ones in 16 bits, too.
        if run.offload:
            return 2 / ranks, 2 / ranks, 0.0
        pipelined = run.pp > 1
        return 4 / ranks + 2 * pipelined, 4 / ranks + 4 * pipelined, 8 / ranks
    # DeepSpeed keeps parameters in both precisions
    is_deepspeed = zero > 0 and not software.rails
    weights = software.parameters + (2 if is_deepspeed and run.gradients == 4 else 0)
    cuts_gradients = zero >= 2 and run.reductions == 1
    optimizer = 0 if run.offload else software.optimizer
    return (
        weights / (ranks if zero == 3 else 1),
        run.gradients / (ranks if cuts_gradients else 1),
        optimizer / (ranks if zero else 1),
    )


def gathered(run: Setup) -> float:
    """Return the bytes that ZeRO 3 gathers: two layers at a time with their gradients, and tables.

    Experts without copies are never sharded, so they are not gathered either.
    """
    parameters = 0.0
    for count, same in run.parts:
        if same.ranks > 1 or run.ep == 1:
            parameters += count
    inputs = 4 * run.share.tokens * run.model.hidden if run.tp > 1 else 0
    wide = 2 if run.autocast else 1
    return wide * (8 * parameters + 4 * table_parameters(run)) + inputs


def in_flight(run: Setup, stage: int) -> float:
    """Return the most layers whose activations a rank holds at once, each as often as microbatches
    are in flight through it: as the schedules' papers have it.
    """
    m, p, v = run.microbatches, run.pp, run.chunks
    layers = run.layers()[stage]
    if run.schedule == "gpipe":
        return m * layers
    if p == 1:
        return layers
    if run.schedule.startswith(("zb-2p", "zb-h2")):
        return min(m, 2 * p - 1) * layers
    if run.schedule in V_SHAPED:
        most = 2 * p + (run.schedule == "dualpipe-v")
        return min(2 * m, most) * longest(run, stage)
    if run.schedule == "zb1p":
        return min(m * v, p * v - stage) * longest(run, stage)
    if run.schedule.startswith("zb"):
        return min(m, p) * layers
    if v == 1:
        return min(m, p - stage) * layers
    # interleaved: p microbatches of each chunk in turn, until the first backward
    warm_up = min(m * v, 2 * (p - stage - 1) + (v - 1) * p + 1)
    rounds, left = divmod(warm_up, p * v)
    found = 0.0
    for chunk in range(v):
        in_turn = rounds * p + min(p, max(0, left - chunk * p))
        found += in_turn * run.stages()[chunk * p + stage]
    return found


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


def activations(run: Setup) -> tuple[float, float]:
    """Return the bytes that a layer keeps for each microbatch, and those of a layer at work."""
    everything, every_other_product = needed(run)
    scores = 0.0
    if run.software.kernel == "unfused":
        queries = run.sequence // run.cp
        scores = 5 * run.model.heads / run.tp * queries * run.sequence * run.share.batch
    width = 4 if run.autocast else 2
    entry = width * run.share.tokens * run.model.hidden / (run.tp if run.sp else 1)
    saved = {
        "none": everything + scores,
        "selective": everything,
        "op": every_other_product,
        "half": (everything + entry) / 2,
        "full": entry,
    }[run.recompute]
    return saved, everything + scores - saved


def needed(run: Setup) -> tuple[float, float]:
    """Return the bytes that backward needs of a layer, without scores: all of them, and those that
    the policy "op" keeps.
    """
    model, tp, tokens = run.model, run.tp, run.share.tokens
    if not model.gated:
        queries, batch = run.sequence // run.cp, run.share.batch
        everything = layer_activations(
            queries, batch, model.hidden, model.heads, tp, run.sp, attention_weights=False
        )
        return everything, everything / 2
    routed = model.top_k + model.shared if model.experts else 1
    # norms and sums: without sequence parallelism each rank along tp has all of them
    between = 8 * tokens * model.hidden / (tp if run.sp else 1)
    outputs = 4 * (model.heads + model.kv) * model.head_dim
    if run.autocast:  # of what two norms return, five copies for products, by all tokens
        between += 10 * tokens * model.hidden
    everything = between + tokens * (outputs + 8 * model.ffn * routed) / tp
    keys = 2 * model.kv * model.head_dim
    kept = 0.75 * between + tokens * (keys + 2 * model.ffn * routed) / tp
    return everything, kept
