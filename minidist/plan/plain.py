"""The plain page of the planner: a step, a GPU's bytes and the bill in closed form, in the words of
the papers.

    operations   6 N + 12 L s h a token, forward and backward      (Narayanan et al. 2021, equation 3, by token)
    tensor       4 all-reduces of 2 s b h bytes a layer, and a ring sends 2 (P - 1)/P n of n bytes
    bubble       (p - 1)/(v m) of the ideal time                   (Narayanan et al. 2021, section 2.2)
    states       16 bytes a parameter, which ZeRO divides          (Rajbhandari et al. 2020)
    activations  s b h (10 + 24/t) a layer, or 34/t with sequence parallelism, of each microbatch under way
                                                                   (Korthikanti et al. 2022,
                                                                   equations 2 and 4)

The letters are those of the papers. A model has N parameters, L layers, h channels and sequences of
s tokens. A step has m microbatches of b sequences. Tensor, pipeline and data parallelism have t, p
and d ranks; a rank has v chunks.

Two things are simpler here than on a real cluster: every layer computes at one `rate`, and only
gradients are sent while something is computed (the backward of the last microbatch). `step.py` and
`memory/` have no such limits: they know products by their tiles, every schedule and software,
experts and long sequences.
"""

from typing import TypeAlias

from minidist.plan.equation import layer_activations, layer_input, model_states

Sizes: TypeAlias = tuple[float, int, int, int]
"""A model: parameters, layers, channels, and tokens of a sequence."""


def operations(n: float, layers: int, hidden: int, s: int) -> float:
    """Return the operations of a token, forward and backward.

    6 for a parameter; for attention 12 L s h, with all pairs of tokens counted.
    """
    return 6 * n + 12 * layers * s * hidden


def ring(bytes: float, ranks: int, bandwidth: float) -> float:
    """Return the seconds of a ring all-reduce: 2 (P - 1)/P of the bytes pass each link."""
    return 2 * (ranks - 1) / ranks * bytes / bandwidth


def bubble(p: int, m: float, v: int = 1, of_step: bool = False) -> float:
    """Return the bubble as a share of the ideal time, (p - 1)/(v m).

    `of_step`: as a share of the whole step, (p - 1)/(v m + p - 1).
    """
    idle = p - 1
    length = v * m + idle if of_step else v * m
    return idle / length


def in_flight(p: int, m: float, v: int = 1) -> float:
    """Return for how many microbatches the first stage keeps activations: p, or p + (p - 1)/v with
    chunks, but never more than m.
    """
    started = p + (p - 1) / v if v > 1 else p
    return min(m, started)


def step(
    model: Sizes,
    m: int,
    b: int,
    t: int,
    p: int,
    d: int,
    *,
    rate: float,
    inside: float,
    across: float,
    v: int = 1,
    recompute: bool = False,
) -> dict[str, float]:
    """Return where the seconds of a step go.

    A GPU reaches `rate` FLOP/s. Rings reach `inside` bytes/s along the tensor axis and `across`
    along the data axis. Recomputing runs the forward once more: a third of the operations, and two
    of six all-reduces a layer.
    """
    n, layers, hidden, s = model
    # one microbatch on one GPU
    computing = b * s * operations(*model) / (t * p * rate)
    recomputing = computing / 3 if recompute else 0.0
    all_reduces = 6 if recompute else 4
    tensor = layers / p * all_reduces * ring(2 * s * b * hidden, t, inside)
    # now all m of them, one after the other, and the bubble around them
    seconds = {"computing": m * computing, "recomputing": m * recomputing, "tensor": m * tensor}
    seconds["bubble"] = bubble(p, m, v) * sum(seconds.values())
    # Gradients leave during the last backward: only what takes longer than that adds to the step.
    last_backward = 2 / 3 * computing + recomputing
    reducing = ring(2 * n / (t * p), d, across)
    seconds["data"] = max(0.0, reducing - last_backward)
    return seconds


def bytes_held(
    model: Sizes,
    m: int,
    b: int,
    t: int,
    p: int,
    d: int,
    *,
    v: int = 1,
    zero: int = 0,
    sp: bool = False,
    recompute: bool = False,
) -> dict[str, float]:
    """Return the bytes of a GPU of the first stage, which is the fullest.

    Attention is flash attention, which stores no scores.
    """
    n, layers, hidden, s = model
    states = model_states(n / (t * p), d, zero)
    # one layer and one microbatch: all that backward needs, and what recomputing saves of it
    needed = layer_activations(s, b, hidden, 1, t, sp, attention_weights=False)
    saved = needed
    if recompute:
        saved = layer_input(s, b, hidden) / (t if sp else 1)
    # now for each layer and each microbatch in flight, and the one layer that is computed again
    activations = in_flight(p, m, v) * layers / p * saved + needed - saved
    return {**vars(states), "activations": activations}


def fits(bytes: dict[str, float], gib: float, reserved: float) -> bool:
    """Tell whether a GPU of so many GiB, some of them reserved, has room for what `bytes_held`
    returns.
    """
    return sum(bytes.values()) <= (gib - reserved) * 2**30


def bill(
    seconds: float, tokens: float, batch: float, gpus: int, price: float
) -> tuple[float, float]:
    """Return days and money of a run: steps of `batch` tokens, at `price` a GPU and hour."""
    steps = -(-tokens // batch)
    hours = steps * seconds / 3600
    return hours / 24, hours * gpus * price
