"""The price of training, before it begins: bytes held, bytes sent, seconds, money; in closed form.

    states        16 bytes a parameter, which ZeRO divides          (Rajbhandari et al. 2020, section 5)
    activations   s b h (10 + 24/t) a layer, or 34/t with sp        (Korthikanti et al. 2022, equations 2, 4)
    operations    6 N + 12 L s h a token, forward and backward      (Narayanan et al. 2021, equation 3)
    bubble        (p - 1)/m of the ideal time                       (Narayanan et al. 2021, section 2.2)
    messages      a ring sends 2 (P - 1)/P n bytes of n             (Patarasuk & Yuan 2009)

The papers' letters: N parameters, L layers, h channels, s tokens in a sequence, m microbatches of b
sequences, t and p ranks along tp and pp. The 34 bytes are those of a layer in 16 bits with flash
attention; without sequence parallelism each tp rank holds all 10 bytes that norms and sums keep.
"""

from dataclasses import dataclass, field
from typing import Any

from minidist.model import GPTConfig


def option(default: Any, text: str) -> Any:
    """Declare a field with its default, and its help on the command line."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Layout:
    """Layout of a run: ranks along each axis, and what they do."""

    dp: int = option(1, "data parallel ranks")
    cp: int = option(1, "ranks that share each sequence")
    pp: int = option(1, "pipeline stages")
    tp: int = option(1, "ranks that share each matrix")
    zero: int = option(0, "1, 2, 3: shard state, gradients, parameters among dp*cp ranks")
    sp: bool = option(False, "sequence parallelism, with --tp")
    batch: int = option(16, "sequences of a step, over all ranks")
    microbatches: int = option(1, "parts in which a rank computes its sequences")
    recompute: bool = option(False, "keep only the input of each layer for backward")

    @property
    def sequences(self) -> float:
        """Sequences of a microbatch (b)."""
        return self.batch / (self.dp * self.microbatches)


def parameters(config: GPTConfig) -> int:
    """Return N, of embedding, head, layers and the last norm."""
    words = config.vocabulary * config.hidden
    tables = words if config.tied else 2 * words
    layer = matrices(config) + 2 * config.hidden
    return config.layers * layer + tables + config.hidden


def matrices(config: GPTConfig) -> int:
    """Return the parameters of a layer's matrices."""
    heads = config.heads + config.key_value_heads
    attention = 2 * config.hidden * heads * config.head_dim
    return attention + 3 * config.hidden * config.intermediate


def bytes_held(config: GPTConfig, layout: Layout) -> dict[str, float]:
    """Return the bytes of a GPU of the first stage, which is the fullest, in mixed precision.

    A parameter takes 2 bytes, its gradient 2, masters and moments of AdamW 12. 1F1B holds min(p, m)
    microbatches. Recomputing holds a layer's input, and the inside of one layer.
    """
    n = parameters(config) / (layout.tp * layout.pp)
    ranks = layout.dp * layout.cp
    tokens = layout.sequences * config.sequence / layout.cp
    x = tokens * config.hidden  # numbers of an activation
    parts = layout.tp if layout.sp else 1
    layer = x * (10 / parts + 24 / layout.tp)
    kept = 2 * x / parts if layout.recompute else layer
    in_flight = min(layout.pp, layout.microbatches)
    layers = config.layers / layout.pp
    return {
        "parameters": 2 * n / (ranks if layout.zero >= 3 else 1),
        "gradients": 2 * n / (ranks if layout.zero >= 2 else 1),
        "optimizer": 12 * n / (ranks if layout.zero >= 1 else 1),
        "activations": in_flight * layers * kept + layer - kept,
    }


def bytes_sent(config: GPTConfig, layout: Layout, itemsize: int) -> dict[str, float]:
    """Return what a rank sends along each axis in a step, in the mean over ranks; to the byte."""
    tp, pp, cp = layout.tp, layout.pp, layout.cp
    m, layers = layout.microbatches, config.layers
    wide = max(4, itemsize)  # of sums in float32
    tokens = layout.sequences * config.sequence  # of a microbatch
    x = tokens * config.hidden * itemsize  # an activation
    words = config.vocabulary * config.hidden / tp
    # Tensor: f and g of attention and MLP, forward and backward; once for embedding, for the head.
    in_a_layer = 6 if layout.recompute else 4
    reduced = (in_a_layer * layers + 2) * x
    reduced += 3 * tokens * wide  # the loss: the largest logit, the denominator, the target's
    if layout.sp:
        reduced += (2 * layers + 1) * config.hidden * itemsize  # gradients of the norms
    # Pipeline: an output and a gradient for each microbatch.
    passed_on = 2 * m * (pp - 1) * x
    if layout.sp:
        passed_on /= tp
    if config.tied and pp > 1:
        passed_on += 2 * words * itemsize
    # Context: keys and values go round in forward and in backward, and gradients all the way home.
    rounds = 3 if layout.recompute else 2
    hops = rounds * (cp - 1) * itemsize
    if cp > 1:
        hops += cp * wide
    width = config.key_value_heads * config.head_dim
    blocks = layers * m * 2 * tokens / cp * width
    # Data: ZeRO-2 and 3 reduce each microbatch; 3 gathers layers twice for each, all else once.
    inside = layers * (matrices(config) / tp + 2 * config.hidden)
    tables = words if config.tied and pp == 1 else 2 * words
    outside = tables + config.hidden
    numbers = 2 * (inside + outside) / pp
    if layout.zero == 2:
        numbers = (m + 1) * (inside + outside)
    elif layout.zero == 3:
        numbers = m * (3 * inside + 2 * outside)
    return {
        "dp": ring(layout.dp * cp) / 2 * numbers * itemsize,
        "tp": ring(tp) * m * reduced / pp,
        "pp": passed_on / pp,
        "cp": blocks * hops,
    }


def ring(ranks: int) -> float:
    """Return how many times its bytes a rank sends in a ring all-reduce: 2 (P - 1)/P."""
    return 2 * (ranks - 1) / ranks


def step_seconds(
    config: GPTConfig, layout: Layout, rate: float, inside: float, across: float
) -> dict[str, float]:
    """Return where the seconds of a step go.

    A GPU reaches `rate` operations/s, messages along tp `inside` bytes/s, along dp `across`. Forward
    is a third of the operations. Gradients leave during the last backward; the rest adds to the step.
    """
    m, tokens = layout.microbatches, layout.sequences * config.sequence
    attention = 12 * config.layers * config.sequence * config.hidden
    operations = tokens * (6 * parameters(config) + attention)
    gpus = layout.tp * layout.pp * layout.cp
    once = operations / (gpus * rate)
    again = once / 3 if layout.recompute else 0.0
    sent = bytes_sent(config, layout, 2)
    seconds = {"computing": m * once, "recomputing": m * again, "tensor": sent["tp"] / inside}
    seconds["bubble"] = (layout.pp - 1) / m * sum(seconds.values())
    backward = 2 / 3 * once + again
    seconds["data"] = max(0.0, sent["dp"] / across - backward)
    return seconds


def bill(
    seconds: float, tokens: float, batch: float, gpus: int, price: float
) -> tuple[float, float]:
    """Return days and money of a run: steps of `batch` tokens, at `price` a GPU and hour."""
    steps = -(-tokens // batch)
    hours = steps * seconds / 3600
    return hours / 24, hours * gpus * price
