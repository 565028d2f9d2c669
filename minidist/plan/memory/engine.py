"""What Megatron Core keeps for backward, whose layers are Transformer Engine's.

    norm ─x─▶ linear ─q k v─▶ attention ─out─▶ linear ─▶ + ─x─▶ norm ─x─▶ linear ─gate, up─▶ SwiGLU ─▶ linear ─▶ +

Each operation keeps its inputs, but no tensor is kept twice, and sums keep nothing. So of h channels,
d a head, f of the MLP a token keeps, in 16 bits,

    attention     2h + 2h          input of the norm, and what it returns: the input of the fused product (of q, k, v)
                  2 q + 2 k + 2 v  after rotation, and the output 2 q with a float32 for each head
                  2 q              once more if ranks along cp exchange heads: attention's output before that
    latent        2h + 2h, and each latent vector before and after its norm; keys as wide as queries
    MLP           2h + 2h, gate and up 4f once (without a gate 2f), and their product 2f; dropout's two masks 2h
    experts       2h + 2h, gate and up and product as above for each of top_k experts, whose inputs are 2h more each
                  (the rows as they came), and 17 bytes an expert: logits and probabilities in float32, the map, row ids

With 8 bits (or 4) a linear layer keeps its *quantized* input, of one byte and its scales; attention,
gate and up keep 16 bits, and so do norms. An input that 16 bits shared with attention or another
layer then has a copy of its own. Sequence parallelism divides all, tp all but 2h + 2h.

Beside layers there are

    placeholders  Megatron adds gradients of weights to its own buffers, and hands autograd an empty tensor in their
                  place: one for each *shape* of weights, kept for ever (2 bytes a parameter of a layer; of one expert)
    head          another for the head while it is at work, logits in 16 bits once (the fused loss puts their gradient
                  in their place), inputs and gradients of all tokens
    workspaces    of cuBLAS, one of Transformer Engine and one of torch; with experts one more for each of four streams

What is cheap can be computed again, and the rest kept (`recompute` "parts"): what norms return, the product that the
last linear layer of an MLP reads, and queries, keys and values that latent channels make. Megatron Core calls them
recompute_modules layernorm, moe_act and mla_up_proj. Software that is `narrow` keeps what an activation reads in 8 bits
(activation_func_fp8_input_store), and attention's output once, in 12 (DeepSeek-V3, 2024, sections 3.2.3 and 3.3.3).

Nothing here is fitted. (Megatron-LM, core/tensor_parallel/layers.py and core/transformer; Transformer
Engine 2, pytorch/module/base.py: `get_dummy_wgrad`, layernorm_linear.py, grouped_linear.py and
cross_entropy.py; counted as Korthikanti et al. 2022, section 4.)
"""

from typing import TypeAlias

from minidist.plan.memory.states import table_parameters
from minidist.plan.run import Setup, once

Shape: TypeAlias = tuple[float, float]
"""Rows and columns of a weight on a rank."""

INPUT = {
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8-rows": 1.0,
    "mxfp8": 1 + 1 / 32,
    "nvfp4": 1 / 2 + 1 / 16,
}
"""Bytes of an element that a linear layer keeps of its input, with scales of 8 bits."""

NARROW_OUTPUT = 12 / 8  # bytes of an element of attention's output: E5M6
WORKSPACE = 32 * 2**20
STREAMS = 4
OF_EXPERT = 4 + 4 + 1 + 2 * 4
"""Bytes of a token for each expert: its logit and probability, the map, and two row ids."""


# ---------------------------------------------------------------- layers


def kept(run: Setup) -> float:
    """Return the bytes that backward needs of a layer, and a microbatch."""
    model = run.model
    of_token = kept_of_scores(run)
    of_token += kept_of_latent(run) if model.latent else kept_of_inputs(run)
    of_token += kept_of_experts(run) if model.experts else kept_of_mlp(run)
    if model.dropout:
        of_token += 2 * model.hidden / run.whole  # two masks
    return run.share.tokens * of_token


def computed_again(run: Setup) -> float:
    """Return the bytes of these that are cheap to compute again: what norms return, the product that an
    MLP's last layer reads, and what latent channels make.
    """
    model = run.model
    width = INPUT[run.precision]
    of_norms = width  # before attention
    if model.latent and run.bits8:
        of_norms += width  # two layers read it
    # the router reads 16 bits; routed rows are kept as they came
    of_norms += 2 if model.experts else width
    if model.shared and run.bits8:
        of_norms += width
    of_token = of_norms * model.hidden / run.whole
    if model.latent:
        of_token += width * (model.query_latent + model.latent) / run.whole
        of_token += 2 * model.heads * (2 * model.key_dim + model.head_dim) / run.tp
    of_token += width * model.ffn * model.used / run.tp
    return run.share.tokens * of_token


def kept_of_inputs(run: Setup) -> float:
    """Return the bytes of a token before a linear layer: what its norm reads, and what that returns."""
    each = 2 + INPUT[run.precision]
    return each * run.model.hidden / run.whole


def kept_of_latent(run: Setup) -> float:
    """Return the bytes of a token before queries, keys and values that latent channels make."""
    model = run.model
    width = INPUT[run.precision]
    # two layers read what the norm returns; they share it unless each quantizes it
    readers = 2 if run.bits8 else 1
    before = (2 + readers * width) * model.hidden
    latent = model.query_latent + model.latent
    before += (2 + width) * latent
    before += 2 * model.rotary
    return before / run.whole


def kept_of_scores(run: Setup) -> float:
    """Return the bytes of a token of attention itself, and of the product after it."""
    model = run.model
    kv = model.heads if model.latent else model.kv
    queries = model.heads * model.key_dim
    keys = kv * model.key_dim
    values = kv * model.head_dim
    output = model.heads * model.head_dim
    kept: float = 2 * (queries + keys + values)
    kept += 4 * model.heads
    if run.software.narrow:
        kept += NARROW_OUTPUT * output
    elif run.bits8:
        kept += (2 + INPUT[run.precision]) * output
    else:
        kept += 2 * output
    if run.cp > 1 and run.cp_comm == "ulysses":
        kept += 2 * output
    return kept / run.tp


def kept_of_mlp(run: Setup) -> float:
    """Return the bytes of a token of an MLP and the norm before it."""
    return kept_of_inputs(run) + inside(run) / run.tp


def kept_of_experts(run: Setup) -> float:
    """Return the bytes of a token of a layer of experts, whose load is balanced."""
    model = run.model
    width = INPUT[run.precision]
    before: float = (2 + 2) * model.hidden  # the router reads 16 bits
    if model.shared and run.bits8:
        before += width * model.hidden
    before += OF_EXPERT * model.experts
    of_row = width * model.hidden + inside(run)
    rows = model.top_k * of_row
    rows += model.shared * inside(run)
    return before / run.whole + rows / run.tp


def inside(run: Setup) -> float:
    """Return the bytes of a token inside an MLP: gate and up, and what the last product reads."""
    before = before_activation(run) / (2 if run.software.narrow else 1)
    return (before + INPUT[run.precision]) * run.model.ffn


def before_activation(run: Setup) -> int:
    """Return the bytes of a token and channel that the activation reads: gate and up, or one."""
    return 4 if run.model.gated else 2


# ---------------------------------------------------------------- what is there for a moment


@once
def of_backward(run: Setup) -> float:
    """Return the bytes of gradients in a layer's backward, while all that it kept is still there.

    Most are those of gate and up, the product being gone; of experts, what travels back, twice: as it
    came and in order.
    """
    model = run.model
    gradient = 2 * model.hidden
    passing = gradient / run.whole
    most: float = before_activation(run) * model.ffn
    if model.experts:
        most = 2 * model.top_k * gradient
    return run.share.tokens * (passing + most / run.tp)


def workspaces(run: Setup) -> float:
    """Return the bytes of cuBLAS's workspaces on Hopper and later."""
    streams = STREAMS if run.model.experts else 0
    return (2 + streams) * WORKSPACE


def placeholders(run: Setup, has_leading: bool) -> float:
    """Return the bytes of empty gradients: one for each shape of a layer's weights, and of those of
    a leading layer if the rank has one.
    """
    shapes = set(weights(run))
    if has_leading:
        shapes.update(weights(run.leading))
    return 2 * sum(rows * columns for rows, columns in shapes)


def weights(run: Setup) -> list[Shape]:
    """Return the shape of each weight of a layer."""
    model = run.model
    heads = model.heads / run.tp
    found: list[Shape] = [(model.hidden, heads * model.head_dim)]
    if model.latent:
        queries = model.query_latent or model.hidden
        found.append((heads * model.key_dim, queries))
        found.append((heads * 2 * model.head_dim, model.latent))
        found.append((model.latent + model.rotary, model.hidden))
        if model.query_latent:
            found.append((model.query_latent, model.hidden))
    else:
        both = heads + 2 * model.kv / run.tp
        found.append((both * model.head_dim, model.hidden))
    if not model.experts:
        return found + of_mlp(run, model.ffn / run.tp)
    found += of_mlp(run, model.ffn)  # each expert is whole
    if model.shared:
        wide = model.shared * model.ffn
        found += of_mlp(run, wide / run.tp)
    return found


def of_mlp(run: Setup, wide: float) -> list[Shape]:
    """Return the shapes of both weights of an MLP of `wide` channels."""
    hidden = run.model.hidden
    inner = 2 * wide if run.model.gated else wide
    return [(inner, hidden), (hidden, wide)]


def of_head(run: Setup) -> float:
    """Return the bytes of the last norm and the head: what both keep of their inputs, and those and
    their gradients, of all tokens, while the head's gradients are computed.
    """
    every = 2 * run.share.tokens * run.model.hidden
    kept = 2 * every / run.whole
    if run.tp == 1 or not run.sp:
        return kept + every
    # gathered inputs; their gradients before and after these are scattered
    return kept + 2 * every + every / run.tp


def of_table(run: Setup) -> float:
    """Return the bytes of a gradient of the embedding or of the head, in 16 bits."""
    return 2 * table_parameters(run)
