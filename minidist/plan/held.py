"""What a GPU holds at its peak: the stage of the pipeline that holds most, by category.

The formulas are those of `equation.py` and its papers; here they meet each stage, each schedule and
each software:

    parameters, gradients, optimizer   bytes a parameter, shared out by ZeRO among the ranks that hold the same ones
                   (of experts fewer than of all else); with the framework's own copies
    activations    what the microbatches in flight keep (1F1B: one for each later stage), and one layer at work
    logits         in 16 and 32 bits, where the head is
    communication  gathered layers
    resident       what the driver sees beside tensors: context, NCCL's buffers, fragmentation
"""

from minidist.plan.equation import layer_activations
from minidist.plan.run import Setup

GB = 1e9
Bytes = dict[str, float]


def held(run: Setup) -> Bytes:
    """Return the bytes by category of the fullest GPU at its peak."""
    some = {0, min(1, run.pp - 1), run.pp - 1, *((run.cut.index(max(run.cut)),) if run.cut else ())}
    return max((stage(run, i) for i in sorted(some)), key=lambda each: sum(each.values()))


def stage(run: Setup, i: int) -> Bytes:
    """Return the bytes by category of a GPU of stage `i` at its peak."""
    model, software, tp, tokens = run.model, run.software, run.tp, run.share.tokens
    layers = -(-run.layers()[i] // 1)
    table = model.vocabulary * model.hidden / tp
    tables = (i == 0) + (i == run.pp - 1 and not (model.tied and run.pp == 1))
    saved, working = activations(run)
    talk = 0.0
    # two layers are whole at a time, with their gradients; experts without copies always are
    if run.zero == 3:
        gathered = sum(count for count, same in run.parts if same.ranks > 1 or run.ep == 1)
        talk = 8 * gathered + 4 * table + (4 * tokens * model.hidden if tp > 1 else 0)
    weights = gradients = optimizer = 0.0
    for place, (count, same) in enumerate(run.parts):
        own = layers * count + (tables * table if place == 0 else 0)
        each = state_bytes(run, same.ranks)
        weights, gradients, optimizer = (
            weights + own * each[0],
            gradients + own * each[1],
            optimizer + own * each[2],
        )
    return {
        "parameters": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": in_flight(run, i) * layers * saved + working,
        "logits": tokens
        * -(-model.vocabulary // tp)
        * software.kept_logit
        * (i == run.pp - 1 and not run.fused_loss),
        "communication": talk,
        "resident": run.known["resident"] * GB if software.measured == "driver" else 0.0,
    }


def state_bytes(run: Setup, ranks: int) -> tuple[float, float, float]:
    """Return bytes of weights, gradients and optimizer for a parameter that as many `ranks` hold,
    and ZeRO shards.

    (ZeRO, table 1, and the software's own copies.)
    """
    software, zero, several = run.software, run.zero, run.pp > 1
    # the masters are the parameters; a pipeline keeps them gathered
    if zero == 3 and not software.parameters:
        if run.offload:
            return 2 / ranks, 2 / ranks, 0.0
        return 4 / ranks + 2 * several, 4 / ranks + 4 * several, 8 / ranks
    # DeepSpeed keeps them in both precisions
    twice = 2 * (zero > 0 and not software.rails and run.gradients == 4)
    kept = 0.0 if run.offload else software.optimizer / (ranks if zero else 1)
    weights, cut = software.parameters + twice, zero >= 2 and run.reductions == 1
    return weights / (ranks if zero == 3 else 1), run.gradients / (ranks if cut else 1), kept


def in_flight(run: Setup, i: int) -> float:
    """Return of how many microbatches stage `i` holds activations at most, as the schedules' papers
    have them.
    """
    m, p, v = run.microbatches, run.pp, run.chunks
    if run.schedule == "gpipe":
        return m
    if run.schedule.startswith("zb"):
        return min(m, 2 * p - 1 if run.schedule.startswith(("zb-2p", "zb-h2")) else p)
    return min(m, p - i) if v == 1 else min(m * v, 2 * (p - i - 1) + (v - 1) * p + 1) / v


def activations(run: Setup) -> tuple[float, float]:
    """Return the bytes that a layer keeps for each microbatch, and those of a layer at work."""
    model, tp, tokens = run.model, run.tp, run.share.tokens
    batch, sequence = run.share.batch, run.sequence // run.cp
    entry = 2 * tokens * model.hidden / (tp if run.sp else 1)
    if model.gated:
        routed = model.top_k + model.shared if model.experts else 1
        outputs = 4 * (model.heads + model.kv) * model.head_dim
        # norms and sums: whole without sequence parallelism
        between = 8 * tokens * model.hidden / (tp if run.sp else 1)
        whole = between + tokens * (outputs + 8 * model.ffn * routed) / tp
        half = (
            0.75 * between + tokens * (2 * model.kv * model.head_dim + 2 * model.ffn * routed) / tp
        )
    else:
        whole = layer_activations(
            sequence, batch, model.hidden, model.heads, tp, run.sp, attention_weights=False
        )
        half = whole / 2
    scores = (
        5 * model.heads / tp * sequence * run.sequence * batch
        if run.software.kernel == "unfused"
        else 0.0
    )
    less = {"selective": whole, "op": half, "half": (whole + entry) / 2, "full": entry}
    saved = less.get(run.recompute, whole + scores)
    return saved, whole + scores - saved
