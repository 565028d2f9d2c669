"""What a step sends: the bytes along each axis, all ranks together, as the package's strategies
count them.

    tp     all-reduces of a microbatch's activations: one for the embedding, one for the head's input, two a layer in
           each direction (with sequence parallelism an all-gather and a reduce-scatter, which send as much).
           Recomputing stops before the last of a layer. The loss takes three 32-bit numbers a token; with sequence
           parallelism the norms' gradients are reduced, too
    pp     activations and their gradients across each border of two stages, by each tp rank unless sp has cut them
    cp     a ring of keys and values, forward and backward; their gradients go round in 32 bits, and home. With a
           window only those that another rank sees, in zigzag order, and their gradients back
    ep     four exchanges of the rows that tokens send to their experts, if those have equal loads
    dp     gradients, over dp and cp: 2 (P - 1) of each byte. ZeRO 1 and 2 send half of it as parameters. ZeRO 3
           gathers parameters twice a microbatch, but those outside the layers once
    Muon   with ZeRO slices of matrices go to their owners along dp and back, in 32 bits; blocks are gathered along tp

These are messages of more than 32 KiB: smaller ones take fewer rounds for more bytes
(`full/collectives/choose.py`). `step.py` says how long such messages take. (Rajbhandari et al. 2020,
section 7; Korthikanti et al. 2022, section 4.2.)
"""

from functools import cache
from itertools import pairwise

from minidist.plan.run import Setup


def bytes_sent(run: Setup) -> dict[str, float]:
    """Return the bytes that the ranks of a run send in a step, by axis."""
    return {
        "tp": along_tensor(run) + of_muon(run)["tp"],
        "pp": along_pipeline(run),
        "cp": along_context(run),
        "ep": along_experts(run),
        "dp": along_data(run) + of_muon(run)["dp"],
    }


def of_muon(run: Setup) -> dict[str, float]:
    """Return the bytes that Muon adds along tp and dp."""
    if run.optimizer != "muon":
        return {"tp": 0.0, "dp": 0.0}
    model = run.model
    ranks = run.dp * run.cp
    of_experts = model.experts * model.expert
    dense = model.alike * (model.layer - of_experts)
    dense += model.dense_layers * model.leading.layer
    gathered = 4.0 * (run.tp - 1) * dense
    if not run.zero:  # every replica computes every change
        return {"tp": ranks * gathered, "dp": 0.0}
    copies = ranks // run.ep
    exchanged = dense * (ranks - 1) / ranks
    exchanged += model.alike * of_experts * (copies - 1) / copies
    return {"tp": gathered, "dp": 2 * 4 * exchanged}


def microbatches_of_all(run: Setup) -> int:
    """Return how many microbatches all ranks of the data axes together compute in a step."""
    return run.microbatches * run.dp * run.cp


def along_tensor(run: Setup) -> float:
    """Return the bytes along tp: activations, three numbers a token for the loss, and norms."""
    layers = run.model.layers
    # all-reduces of a layer: two forward, two backward
    of_layer = 4 * run.reduced
    if run.recompute == "full":
        again = 1.5 if run.sp else 1.0
        if run.autocast:  # a sum of 16-bit outputs counts half, and an all-gather of tokens whole
            again -= 0.25 if run.sp else 0.5
        of_layer += again * run.entry
    activations = layers * of_layer + 2 * run.entry
    loss = 12 * run.share.tokens
    norms = (2 * layers + 1) * run.model.hidden * run.kept_width if run.sp else 0
    reduced = activations + loss + norms
    # a ring all-reduce on tp ranks sends 2 (tp - 1) times the bytes, all of them together
    return 2 * (run.tp - 1) * reduced * microbatches_of_all(run)


def along_pipeline(run: Setup) -> float:
    """Return the bytes along pp: activations across each border, and their gradients back."""
    borders = sum(rank != after for rank, after in pairwise(run.rank_of))
    senders = 1 if run.sp else run.tp
    return 2 * borders * run.entry * senders * microbatches_of_all(run)


def along_context(run: Setup) -> float:
    """Return the bytes along cp: keys and values go round, and so do their gradients."""
    if run.cp == 1:
        return 0.0
    model = run.model
    of_layers = (model.layers - model.unwindowed) * sent_in_context(run, model.window)
    of_layers += model.unwindowed * sent_in_context(run, 0)
    return microbatches_of_all(run) * of_layers


def sent_in_context(run: Setup, window: int) -> float:
    """Return the bytes that a rank sends along cp for a layer and a microbatch."""
    model = run.model
    width = run.software.width
    keys = run.share.tokens * 2 * model.kv * model.head_dim * width
    rounds = 3 if run.recompute == "full" else 2
    if 0 < window < run.sequence:
        # a share of what a rank has, of the mean rank
        seen = keys * tokens_seen(run.cp, run.sequence, window) / run.sequence
        return seen * (rounds + 4 / width)
    hops = rounds * (run.cp - 1)
    # gradients go in 32 bits, and one hop more: home
    hops_of_gradients = run.cp * 4 / width
    return keys * (hops + hops_of_gradients)


@cache
def tokens_seen(ranks: int, sequence: int, window: int) -> int:
    """Return how many tokens all ranks send in zigzag order, if each goes to every other rank that
    sees it.

    A rank has two of the 2 P chunks of the sequence. The first query of chunk k sees the window - 1
    tokens before it: so of chunk j, those that the chunks between them leave, the last ones.
    """
    chunk = sequence // (2 * ranks)
    total = 0
    for j in range(2 * ranks):
        for rank in range(ranks):
            pair = (rank, 2 * ranks - 1 - rank)
            later = [k for k in pair if k > j]
            if j not in pair and later:
                left = window - 1 - (min(later) - j - 1) * chunk
                total += min(chunk, max(0, left))
    return total


def along_experts(run: Setup) -> float:
    """Return the bytes along ep: tokens go to their experts and home, forward and backward."""
    model = run.model
    rows = run.share.tokens * model.top_k * model.hidden * run.software.width
    exchanges = 5 if run.recompute == "full" else 4
    sent = rows * exchanges * (run.ep - 1) / run.ep
    return model.alike * microbatches_of_all(run) * sent


def along_data(run: Setup) -> float:
    """Return the bytes along dp and cp: gradients, and what ZeRO gathers."""
    ranks = run.dp * run.cp
    width = run.kept_width
    gradient = run.gradients
    ends = end_parameters(run)
    dense = dense_parameters(run) + ends
    experts = run.model.alike * run.model.experts * run.model.expert
    copies = ranks // run.ep  # of each expert
    if run.zero < 3:
        # an all-reduce; or a reduce-scatter of gradients and an all-gather of parameters
        times = run.microbatches / run.reductions if run.zero == 2 else 1
        each = times * gradient + (width if run.zero else gradient)
        return (ranks - 1) * dense * each + (copies - 1) * experts * each
    # Now each microbatch gathers parameters twice, those outside the layers once, ...
    shards = run.hsdp or ranks
    groups = ranks // shards
    each = 2 * width + gradient
    senders = ranks - groups  # in a group, (shards - 1)/shards of the bytes leave each rank
    sent = senders * (dense * each - ends * width)
    # ... and its gradients are all-reduced over the groups.
    sent += 2 * (groups - 1) * dense * gradient
    return run.microbatches * (sent + (copies - 1) * experts * each)


def end_parameters(run: Setup) -> int:
    """Return the parameters of embedding, head and last norm, on all ranks along tp together."""
    model, tp = run.model, run.tp
    vocabulary = -(-model.vocabulary // tp) * tp  # padded until tp divides it
    tables = 1 if model.tied and run.pp == 1 else 2
    return vocabulary * model.hidden * tables + model.hidden * tp


def dense_parameters(run: Setup) -> int:
    """Return the parameters of all layers but experts, on all ranks along tp together.

    Each rank has all of a layer's norms, of its router and of what makes latent channels.
    """
    model, tp = run.model, run.tp
    norms = 2 * model.hidden * tp
    of_latent = model.latent_down * model.hidden * (tp - 1)
    of_router = model.experts * model.hidden * (tp - 1)
    without_experts = model.layer - model.experts * model.expert
    leading = model.dense_layers * model.leading.layer
    found = model.alike * (without_experts + of_router) + leading
    return found + model.layers * (norms + of_latent)
