"""The plain page of the planner: a step, a GPU's bytes and the bill in closed form, in the words of
the papers.

    operations   6 N + 12 L s h a token, forward and backward      (Narayanan et al. 2021, equation 3, by token)
    tensor       4 all-reduces of 2 s b h bytes a layer, and a ring sends 2 (P - 1)/P n of n bytes
    bubble       (p - 1)/(v m) of the ideal time                   (Narayanan et al. 2021, section 2.2)
    states       16 bytes a parameter, which ZeRO divides          (Rajbhandari et al. 2020)
    activations  s b h (10 + 24/t) a layer, or 34/t with sequence parallelism, of each microbatch under way
                                                                   (Korthikanti et al. 2022,
                                                                   equations 2 and 4)

N parameters, L layers, h channels, s tokens of a sequence, b sequences of a microbatch, m
microbatches; t, p and d ranks of tensor, pipeline and data parallelism, v chunks a rank. `step.py`
and `held.py` say the same for products by their tiles, for every schedule and software, for experts
and long sequences. Here every layer computes at one `rate`, and of what is sent only the gradients
hide: behind the backward of the last microbatch.
"""

from minidist.plan.equation import layer_activations, layer_input, model_states


def operations(n: float, layers: int, hidden: int, s: int) -> float:
    """Return the operations of a token, forward and backward: 6 for a parameter, and attention's,
    all pairs counted.
    """
    return 6 * n + 12 * layers * s * hidden


def ring(bytes: float, ranks: int, bandwidth: float) -> float:
    """Return the seconds of a ring all-reduce: 2 (P - 1)/P of the bytes pass each link."""
    return 2 * (ranks - 1) / ranks * bytes / bandwidth


def bubble(p: int, m: float, v: int = 1, of_step: bool = False) -> float:
    """Return the bubble as a share of the ideal time, (p - 1)/(v m), or of the whole step, (p -
    1)/(v m + p - 1).
    """
    return (p - 1) / (v * m + (p - 1 if of_step else 0))


def in_flight(p: int, m: float, v: int = 1) -> float:
    """Return how many microbatches the first stage holds: 1F1B p, with v chunks p + (p - 1)/v;
    never more than m.
    """
    return min(m, p + (p - 1) / v if v > 1 else p)


def step(
    model: tuple[float, int, int, int], m: int, b: int, t: int, p: int, d: int, *, rate: float, inside: float,
    across: float, v: int = 1, recompute: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Return where the seconds of a step go. `model` is (N, layers, hidden, tokens of a sequence).

    `rate`: FLOP/s that a GPU reaches; `inside`, `across`: bytes/s of a ring along the tensor and
    along the data axis. Recomputing runs the forward once more: a third of the operations, and two
    of six all-reduces a layer.
    """
    n, layers, hidden, s = model
    one = b * s * operations(*model) / (t * p * rate)  # a microbatch on one GPU
    again = one / 3 if recompute else 0.0
    tensor = layers / p * (6 if recompute else 4) * ring(2 * s * b * hidden, t, inside)
    seconds = {"computing": m * one, "recomputing": m * again, "tensor": m * tensor}
    seconds["bubble"] = bubble(p, m, v) * sum(seconds.values())
    seconds["data"] = max(0.0, ring(2 * n / (t * p), d, across) - (2 / 3 * one + again))
    return seconds


def held(
    model: tuple[float, int, int, int], m: int, b: int, t: int, p: int, d: int, *, v: int = 1, zero: int = 0,
    sp: bool = False, recompute: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Return the bytes of a GPU of the first stage, which holds most; flash attention keeps no
    scores.
    """
    n, layers, hidden, s = model
    states = model_states(n / (t * p), d, zero)
    whole = layer_activations(s, b, hidden, 1, t, sp, attention_weights=False)
    kept = layer_input(s, b, hidden) / (t if sp else 1) if recompute else whole
    # and one layer that is computed again
    activations = in_flight(p, m, v) * layers / p * kept + whole - kept
    return {**vars(states), "activations": activations}


def fits(bytes: dict[str, float], gib: float, reserved: float) -> bool:
    """Tell whether a GPU of so many GiB, some of them reserved, has room for what `held`
    returns.
    """
    return sum(bytes.values()) <= (gib - reserved) * 2**30


def bill(
    seconds: float, tokens: float, batch: float, gpus: int, price: float
) -> tuple[float, float]:
    """Return days and money of a run: steps of `batch` tokens, at `price` a GPU and hour."""
    hours = -(-tokens // batch) * seconds / 3600
    return hours / 24, hours * gpus * price
