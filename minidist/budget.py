"""The price of training, before it begins: bytes held, bytes sent, seconds, money; in closed form.

    states        16 bytes a parameter, which ZeRO divides          (Rajbhandari et al. 2020, section 5)
    activations   s b h (10 + 24/t) a layer, or 34/t with sp        (Korthikanti et al. 2022, equations 2, 4)
    operations    6 N + 12 L s h a token, forward and backward      (Narayanan et al. 2021, equation 3)
    bubble        (p - 1)/m of the ideal time                       (Narayanan et al. 2021, section 2.2)
    messages      a ring sends 2 (P - 1)/P n bytes of n             (Patarasuk & Yuan 2009)

The letters are those of the papers. A model has N parameters, L layers, h channels, V words and
sequences of s tokens. A step has m microbatches of b sequences on each data parallel rank; tensor
and pipeline parallelism have t and p ranks.

The 34 bytes are those of a layer in 16 bits with flash attention; a third of it stays whole on each
tensor parallel rank without sequence parallelism: what norms and sums keep.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from minidist.model import GPTConfig


def option(default: Any, text: str) -> Any:
    """Declare a field with its default, and the help that the command line prints."""
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
    """Return N."""
    head = 0 if config.tied else config.vocabulary * config.hidden
    outside = config.vocabulary * config.hidden + head + config.hidden
    return config.layers * (matrices(config) + 2 * config.hidden) + outside


def matrices(config: GPTConfig) -> int:
    """Return the parameters of a layer's matrices."""
    attention = 2 * config.hidden * (config.heads + config.key_value_heads) * config.head_dim
    return attention + 3 * config.hidden * config.intermediate


# ---------------------------------------------------------------- bytes held


def bytes_held(config: GPTConfig, layout: Layout) -> dict[str, float]:
    """Return the bytes of a GPU of the first stage, which is the fullest, in mixed precision.

    A parameter takes 2 bytes, its gradient 2, masters and moments of AdamW 12. 1F1B holds p
    microbatches on the first stage, or m if there are fewer. Recomputing holds a layer's input, and
    the inside of one layer.
    """
    n = parameters(config) / (layout.tp * layout.pp)
    ranks = layout.dp * layout.cp
    one = layout.sequences * config.sequence / layout.cp * config.hidden  # numbers of a tensor
    needed = one * (34 / layout.tp if layout.sp else 10 + 24 / layout.tp)
    saved = 2 * one / (layout.tp if layout.sp else 1) if layout.recompute else needed
    in_flight = min(layout.pp, layout.microbatches)
    return {
        "parameters": 2 * n / (ranks if layout.zero >= 3 else 1),
        "gradients": 2 * n / (ranks if layout.zero >= 2 else 1),
        "optimizer": 12 * n / (ranks if layout.zero >= 1 else 1),
        "activations": in_flight * config.layers / layout.pp * saved + needed - saved,
    }


# ---------------------------------------------------------------- bytes sent


def bytes_sent(config: GPTConfig, layout: Layout, itemsize: int) -> dict[str, float]:
    """Return what a rank sends along each axis in a step, in the mean over all ranks.

    `itemsize` are the bytes of a number; sums in float32 or wider take their own. This is what
    `train` counts, to the byte.
    """
    p, m, wide = layout.pp, layout.microbatches, max(4, itemsize)
    tokens = layout.sequences * config.sequence  # of a microbatch
    x = tokens * config.hidden * itemsize  # bytes of an activation
    # Attention and MLP of each layer, f and g, forward or backward; then embedding and head.
    all_reduced = ((6 if layout.recompute else 4) * config.layers + 2) * x
    all_reduced += 3 * tokens * wide  # the loss: the largest logit, the denominator, the target's
    if layout.sp:
        all_reduced += (2 * config.layers + 1) * config.hidden * itemsize  # gradients of the norms
    passed_on = 2 * m * (p - 1) * x / (layout.tp if layout.sp else 1)
    if config.tied and p > 1:
        passed_on += 2 * config.vocabulary * config.hidden / layout.tp * itemsize
    return {
        "dp": _data(config, layout) * itemsize,
        "tp": ring(layout.tp) * m * all_reduced / p,
        "pp": passed_on / p,
        "cp": _context(config, layout, itemsize, wide),
    }


def ring(ranks: int) -> float:
    """Return how many times its bytes a rank sends in a ring all-reduce: 2 (P - 1)/P."""
    return 2 * (ranks - 1) / ranks


def _data(config: GPTConfig, layout: Layout) -> float:
    """Return the numbers that a rank sends for gradients and parameters."""
    copies = 2 if layout.pp > 1 or not config.tied else 1  # of a matrix of the vocabulary
    inside = config.layers * (matrices(config) / layout.tp + 2 * config.hidden)
    outside = copies * config.vocabulary * config.hidden / layout.tp + config.hidden
    half, m = ring(layout.dp * layout.cp) / 2, layout.microbatches
    if layout.zero <= 1:
        return 2 * half * (inside + outside) / layout.pp
    if layout.zero == 2:
        return half * (m + 1) * (inside + outside)  # each microbatch is reduced
    # The layers are gathered for forward and for backward, all else once; both are reduced.
    return half * m * (3 * inside + 2 * outside)


def _context(config: GPTConfig, layout: Layout, itemsize: int, wide: int) -> float:
    """Return the bytes of keys and values that go round: forward, and backward with gradients."""
    c, width = layout.cp, config.key_value_heads * config.head_dim
    block = 2 * layout.sequences * config.sequence / c * width
    rounds = (3 if layout.recompute else 2) * (c - 1) * itemsize + (c * wide if c > 1 else 0)
    return config.layers * layout.microbatches * block * rounds


# ---------------------------------------------------------------- seconds, money


def step_seconds(
    config: GPTConfig, layout: Layout, rate: float, inside: float, across: float
) -> dict[str, float]:
    """Return where the seconds of a step go.

    A GPU reaches `rate` operations/s; messages along tp reach `inside` bytes/s, and those along dp
    `across`. Recomputing runs the forward once more, a third of the operations. Gradients leave
    during the last backward: only what takes longer than that adds to the step.
    """
    m, tokens = layout.microbatches, layout.sequences * config.sequence
    attention = 12 * config.layers * config.sequence * config.hidden
    operations = tokens * (6 * parameters(config) + attention)
    once = operations / (layout.tp * layout.pp * layout.cp * rate)
    again = once / 3 if layout.recompute else 0.0
    sent = bytes_sent(config, layout, 2)
    seconds = {"computing": m * once, "recomputing": m * again, "tensor": sent["tp"] / inside}
    seconds["bubble"] = (layout.pp - 1) / m * sum(seconds.values())
    seconds["data"] = max(0.0, sent["dp"] / across - 2 / 3 * once - again)
    return seconds


def bill(
    seconds: float, tokens: float, batch: float, gpus: int, price: float
) -> tuple[float, float]:
    """Return days and money of a run: steps of `batch` tokens, at `price` a GPU and hour."""
    steps = -(-tokens // batch)
    hours = steps * seconds / 3600
    return hours / 24, hours * gpus * price
