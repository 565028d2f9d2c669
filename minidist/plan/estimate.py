"""Will it fit? The bytes of one GPU, from the sizes of a model and the layout alone.

    estimate(7e9, layers=32, hidden=4096, batch=1, sequence=4096, heads=32, vocabulary=32000, dp=8, zero=1)

The formulas are those of `equation.py`. The GPU is one of the first pipeline stage, which holds the most: 1F1B has a
microbatch in flight there for each later stage. The framework and its libraries need one to two GB more on each GPU.
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from typing import Literal

from minidist.plan.equation import (
    MIXED_PRECISION_ADAM,
    ModelStates,
    embedding_and_loss,
    layer_activations,
    layer_input,
    layers_in_flight,
    model_states,
)

GB = 1e9
FRAGMENTATION = 1.05  # bytes that the allocator holds for each byte in use: a guess, to be replaced by a measurement

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Estimate(ModelStates):
    """Bytes of one GPU, by category: model states, activations and communication."""

    activations: float
    communication: float

    @property
    def total(self) -> float:
        """All categories together, with fragmentation."""
        return float(sum(astuple(self)) * FRAGMENTATION)

    def __str__(self) -> str:
        """Show a line per category, in GB of 10^9 bytes."""
        rows = asdict(self) | {f"total (x {FRAGMENTATION} fragmentation)": self.total}
        return "\n".join(f"{name:<30}{value / GB:>8.1f} GB" for name, value in rows.items())


def estimate(
    parameters: float,
    layers: int,
    hidden: int,
    batch: int,
    sequence: int,
    heads: int,
    vocabulary: int,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    zero: int = 0,
    recompute: Recompute = "none",
    sequence_parallel: bool = False,
    flash: bool = True,
    tied: bool = False,
) -> Estimate:
    """Return the bytes that a GPU of the first stage holds at its peak, with mixed-precision Adam.

    Parameters
    ----------
    parameters : float
        Number of parameters of the whole model.
    layers, hidden, heads, vocabulary, sequence : int
        Sizes of the model, and tokens of a sequence.
    batch : int
        Sequences of one microbatch.
    tp, pp, dp, cp, zero : int
        Ranks on the tensor, pipeline, data and context axis; stage of ZeRO on the data and context axes together.
    recompute : {"none", "selective", "full"}
        Recompute nothing, the attention weights, or all of a layer but its input; one layer at a time.
    sequence_parallel, flash, tied : bool
        Whether the sequence axis splits what tp leaves whole, whether attention weights are never stored, and whether
        the head uses the embedding's matrix.

    A step has at least `pp` microbatches. Communication is the sum of one gathered input (sequence parallel), two
    boundary activations (pipeline), two blocks of keys and values (a ring, as if no heads were grouped), the
    gradients of the layer that is being reduced (ZeRO 2 and 3), and two gathered layers: the present and the next
    (ZeRO 3). DDP's buckets are the gradients. For a pipeline stage of P parameters:

        ZeRO 2   2 P + (2 + 12)/N P + 2 layer            each microbatch reduces the gradients of a layer as soon as
        ZeRO 3   (2 + 2 + 12)/N P + (2 + 2 * 2) layer    it has them, so no stage ever holds all gradients

    That saves memory and costs messages: with m microbatches ZeRO 2 and 3 send m times what they send with one.

    Raises
    ------
    ValueError
        If the sizes and the layout do not fit together.
    """
    _check_whole(layers=layers, hidden=hidden, batch=batch, sequence=sequence, heads=heads, tp=tp, pp=pp, dp=dp, cp=cp)
    _check_layout(layers, hidden, heads, tp, pp, recompute)
    if sequence % cp:
        raise ValueError(f"sequence={sequence} does not divide by cp={cp}: ranks share its tokens out evenly")
    sequence //= cp
    ends = vocabulary * hidden
    layer_parameters = (parameters - ends * (1 if tied else 2)) / layers / tp
    own = parameters / tp if pp == 1 else layer_parameters * -(-layers // pp) + ends / tp
    states = model_states(own, dp * cp, zero)

    whole = layer_activations(sequence, batch, hidden, heads, tp, sequence_parallel, attention_weights=not flash)
    boundary = layer_input(sequence, batch, hidden) / (tp if sequence_parallel else 1)
    a_layer = {
        "none": whole,
        "selective": layer_activations(sequence, batch, hidden, heads, tp, sequence_parallel, attention_weights=False),
        "full": boundary,
    }[recompute]
    at_work = whole if recompute == "full" else whole - a_layer
    activations = layers_in_flight(layers, pp, microbatches=pp) * a_layer + at_work
    activations += embedding_and_loss(sequence, batch, hidden, vocabulary, tp, pp, in_flight=pp)

    communication = boundary * tp if tp > 1 and sequence_parallel else 0
    communication += 4 * layer_input(sequence, batch, hidden) / tp if cp > 1 else 0
    communication += 2 * boundary if pp > 1 else 0
    communication += layer_parameters * MIXED_PRECISION_ADAM.gradients if zero >= 2 else 0
    communication += 2 * layer_parameters * MIXED_PRECISION_ADAM.parameters if zero == 3 else 0
    return Estimate(**asdict(states), activations=activations, communication=communication)


def _check_whole(**sizes: int) -> None:
    for name, size in sizes.items():
        if size != int(size) or size < 1:
            raise ValueError(f"{name}={size} is not a whole number of at least 1: give one")


def _check_layout(layers: int, hidden: int, heads: int, tp: int, pp: int, recompute: str) -> None:
    """Refuse an unknown policy, and sizes that the layout does not divide."""
    if recompute not in ("none", "selective", "full"):
        raise ValueError(f"recompute={recompute!r} is not known: use 'none', 'selective' or 'full'")
    if layers < pp:
        raise ValueError(f"layers={layers} are fewer than pp={pp} stages, and some would be empty: use pp <= {layers}")
    if hidden % heads:
        raise ValueError(f"hidden={hidden} does not divide by heads={heads}: each head takes hidden/heads channels")
    if heads % tp:
        raise ValueError(f"heads={heads} does not divide by tp={tp}: each rank computes whole heads")
