"""What a step sends: the bytes along each axis, all ranks together, as the package's strategies
count them.

    tp     all-reduces of a microbatch's activations: one for the embedding, one for the head's input, two a layer in
           each direction (an all-gather and a reduce-scatter, with sequence parallelism, send as
           much); what is recomputed stops before a layer's last; three 32-bit numbers a token for
           the loss; with sp norms' gradients
    pp     activations and their gradients across each border of two stages, by each tp rank unless sp has cut them
    cp     a ring of keys and values, forward and backward; their gradients go round in 32 bits, and home
    ep     four exchanges of the rows that tokens send to their experts, if those have equal loads
    dp     gradients, over dp and cp: 2 (P - 1) of each byte; ZeRO 1 and 2 send a half of it as parameters; ZeRO 3
           gathers parameters twice a microbatch, but those outside the layers once

Messages of more than 32 KiB are meant: smaller ones take fewer rounds for more bytes
(`collectives/choose.py`). `step.py` says how long such messages take. (Rajbhandari et al. 2020,
section 7; Korthikanti et al. 2022, section 4.2.)
"""

from minidist.plan.run import Setup


def sent(run: Setup) -> dict[str, float]:
    """Return the bytes that the ranks of a run send in a step, by axis."""
    model, tp, m, width, share = run.model, run.tp, run.microbatches, run.software.width, run.share
    layers, data, gradient = model.layers, run.dp * run.cp, run.gradients
    again = run.recompute == "full"
    norms = (2 * layers + 1) * model.hidden
    reduced = (
        run.entry * (layers * (4 + again * (1.5 if run.sp else 1)) + 2)
        + 12 * share.tokens
        + norms * width * run.sp
    )
    keys = share.tokens * 2 * model.kv * model.head_dim * width
    rows = share.tokens * model.top_k * model.hidden * width

    root = (
        -(-model.vocabulary // tp) * tp * model.hidden * (1 if model.tied and run.pp == 1 else 2)
        + model.hidden * tp
    )
    experts = layers * model.experts * model.expert
    # a router is whole on each rank along tp
    routers = layers * model.experts * model.hidden * (tp - 1)
    dense = layers * model.layer - experts + routers + root + 2 * layers * model.hidden * tp
    shards = run.shard or data
    # ranks that are not the first of their group, each of which sends all bytes
    scattered = data - data // shards
    if run.zero == 3:
        along_data = scattered * (dense * (2 * m * width + gradient) - m * root * width)
        along_data += 2 * (data // shards - 1) * dense * gradient
        along_data += (data // run.ep - 1) * experts * (2 * m * width + gradient)
    else:
        along_data = (data - 1) * dense * (gradient + (width if run.zero else gradient))
        along_data += (
            (data // run.ep - 1) * experts * (gradient + (width if run.zero else gradient))
        )
    return {
        "tp": 2 * (tp - 1) * reduced * m * data,
        "pp": 2 * (run.pp * run.chunks - 1) * run.entry * (1 if run.sp else tp) * m * data,
        "cp": layers
        * m
        * data
        * keys
        * ((2 + again) * (run.cp - 1) + run.cp * 4 / width)
        * (run.cp > 1),
        "ep": layers * m * data * rows * (4 + again) * (run.ep - 1) / run.ep,
        "dp": along_data,
    }
