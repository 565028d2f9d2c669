"""What autograd saves of our GPT, to the byte: an oracle for the account."""

from __future__ import annotations

from minidist.full.model import GPTConfig
from minidist.plan.equation import layer_matrices


def layer_activations_of(
    config: GPTConfig,
    batch: int,
    time: int,
    dtype_bytes: int,
    flash: bool = True,
    fp8: bool = False,
    autocast: bool = False,
) -> int:
    """Return the bytes that autograd saves in one layer of `minidist.full.model.GPT`.

    Each line stands for what `gpt.py` computes, in the same order. In 16 bits the norms square a
    float32 copy of their input. The count holds for a CPU: a GPU kernel that writes its heads side
    by side needs no copy to merge them.

    Parameters
    ----------
    config : GPTConfig
        The model.
    batch, time : int
        Sequences, and tokens in each.
    dtype_bytes : int
        Bytes of one element of parameters and activations: 2, 4 or 8.
    flash : bool
        Whether torch's fused attention runs. The plain one, the only one on the device `meta`,
        saves the T x T weights, and copies of shared keys and values (counted in float32 and
        float64).
    fp8 : bool
        Whether products are in 8 bits: each saves its input and its weight in these, and two
        scales.
    autocast : bool
        Whether float32 parameters are used under autocast (`dtype_bytes` is 2): then each product
        also saves a copy of its input.
    """
    channels, key_channels = config.hidden, config.key_value_heads * config.head_dim
    tokens, wide_bytes = batch * time, max(4, dtype_bytes)
    # Bytes of each token.
    # input and 1/root; normalised and scaled
    norm = wide_bytes * (channels + 1) + dtype_bytes * 2 * channels
    if flash:
        # q, k, v, found; found with its heads merged
        attention = dtype_bytes * (3 * channels + 2 * key_channels)
        attention += wide_bytes * config.heads  # log-sum-exp
    else:
        # q, k, v, found, merged; the weights
        attention = dtype_bytes * (4 * channels + config.heads * time)
    mlp = dtype_bytes * 4 * config.intermediate  # gate, silu(gate), up, and their product
    # for query, key, value, gate and up; what the norms scale stays in float32
    copies = dtype_bytes * 5 * channels if autocast else 0
    masks = 2 * channels if config.dropout else 0
    kept = tokens * (2 * norm + attention + mlp + copies + masks)
    if fp8:
        products = layer_matrices(config).values()
        # what only products read
        kept -= tokens * dtype_bytes * (3 * channels + config.intermediate)
        kept += sum(inputs * (tokens + outputs) + 2 * 4 for inputs, outputs in products)
    return kept


def activations_of(
    config: GPTConfig,
    batch: int,
    time: int,
    dtype_bytes: int,
    flash: bool = True,
    fp8: bool = False,
    autocast: bool = False,
) -> int:
    """Return the bytes that autograd saves in a forward pass of the model and `cross_entropy_sum`.

    Besides the layers: the rotary table, the final norm, the probabilities, the tokens and the
    targets. Under autocast also the 16-bit copies of weights. Parameters as for `layer_activations_of`.
    """
    channels, wide_bytes = config.hidden, max(4, dtype_bytes)
    norm = wide_bytes * (channels + 1) + dtype_bytes * 2 * channels
    ends = (
        batch * time * (norm + wide_bytes * config.vocabulary + 2 * 8)
        + time * config.head_dim * dtype_bytes
    )
    if autocast:
        ends += batch * time * dtype_bytes * channels  # the head's copy of its input
        ends += time * config.head_dim * (wide_bytes - dtype_bytes)  # the table is in float32
        ends += copy_bytes(config)
    layer = layer_activations_of(config, batch, time, dtype_bytes, flash, fp8, autocast)
    return config.layers * layer + ends


def copy_bytes(config: GPTConfig) -> int:
    """Return the bytes of the 16-bit copies that a forward of our GPT makes of its weights under
    autocast, and keeps until backward if nothing is recomputed.
    """
    weights = config.vocabulary * config.hidden  # the head; an embedding is looked up as it is
    for inputs, outputs in layer_matrices(config).values():
        weights += config.layers * inputs * outputs
    return 2 * weights
