"""The learning rate as a function of the step: warm up, then cool down along a cosine, or in
another shape.

    peak  ┤      ╭───╮               ╭─────────╮
          │    ╱       ╲           ╱             ╲
          │  ╱   cosine  ╲       ╱      wsd        ╲
    final ┤╱               ╲─  ╱                     ╲─
          └┬─────┬─────────┬   ┬─────┬─────────┬─────┬─▶ step
           0   warmup    total 0   warmup    total - cooldown

`linear` falls along a straight line from the end of the warm-up; `constant` never falls. `wsd`
(warm-up, stable, decay) is constant for most of the run: whoever wants to train for longer goes on
from before the fall, which a cosine has not.

Pure functions: a resumed run asks for the rate of its step and has nothing to restore.
"""

import math

SHAPES = ("cosine", "linear", "wsd", "constant")


def learning_rate(
    step: int,
    peak: float,
    warmup: int,
    total: int,
    final_fraction: float = 0.1,
    shape: str = "cosine",
    cooldown: int = 0,
) -> float:
    """Return the rate for one optimizer step: linear warm-up, then `shape` down to a fraction of
    the peak.

    Why warm up: at the start the weights are random and gradients turn quickly, so a long step in
    the direction of one gradient is a bad guess; and Adam's estimate of the variance rests on few
    gradients still. Why a cosine: it stays near the peak for long, where progress is made, and
    lands softly, where long steps along noisy gradients would keep the weights bouncing around the
    minimum.

    Parameters
    ----------
    step : int
        The step about to be taken, counted from 0. Step 0 has rate peak / warmup: a rate of zero
        would waste it.
    peak : float
        The highest rate, reached by step warmup - 1.
    warmup : int
        Steps of warm-up; 0 for none.
    total : int
        Steps of the whole run. Step total - 1 has the final rate (unless the run is all warm-up),
        and so has every step after it.
    final_fraction : float
        The final rate as a fraction of the peak, from 0 to 1. `constant` stays at the peak.
    shape : {"cosine", "linear", "wsd", "constant"}
        What follows the warm-up.
    cooldown : int
        Steps of the straight fall at the end of `wsd`, at most those that the warm-up leaves.

    Raises
    ------
    ValueError
        If warm-up and cool-down are longer than the run, a number is out of its range, or the shape
        is unknown.

    References
    ----------
    Loshchilov & Hutter 2017, "SGDR: Stochastic Gradient Descent with Warm Restarts", equation 5
    (without restarts). Hu et al. 2024, "MiniCPM", section 4 (wsd); Hägele et al. 2024, "Scaling
    Laws and Compute-Optimal Training Beyond Fixed Training Durations".
    """
    if step < 0 or peak < 0 or not 0 <= final_fraction <= 1:
        given = f"step = {step}, peak = {peak}, final_fraction = {final_fraction}"
        raise ValueError(
            f"{given}: the first two must not be negative, the fraction must lie between 0 and 1"
        )
    if not 0 <= warmup <= total:
        raise ValueError(
            f"warmup = {warmup} steps do not fit into total = {total}: warm up for 0 to {total} "
            "steps"
        )
    if shape not in SHAPES:
        raise ValueError(f"shape = {shape!r} is unknown: choose one of {', '.join(SHAPES)}")
    if not 0 <= cooldown <= total - warmup:
        room = f"does not fit into the {total - warmup} steps behind the warm-up"
        raise ValueError(f"cooldown = {cooldown} {room}: cool down for fewer")
    done = step + 1  # steps taken once this one is
    if done <= warmup:
        return peak * done / warmup
    if shape == "constant":
        return peak
    if done >= total:
        return peak * final_fraction
    # how many steps are taken before it begins
    fall = total - cooldown if shape == "wsd" else warmup
    # between 0, the peak, and 1, the final rate
    progress = max(0.0, (done - fall) / (total - fall))
    left = (1 + math.cos(math.pi * progress)) / 2 if shape == "cosine" else 1 - progress
    return peak * (final_fraction + (1 - final_fraction) * left)


def linear_scaling(base_rate: float, base_batch: int, batch: int) -> float:
    """Return the rate for another batch size: k times the batch, k times the rate.

    Why: k small steps of rate r move the weights by -r times the sum of k mean gradients. One step
    on the k batches together has their mean gradient, k times less than that sum; with rate k * r
    it goes just as far, provided the gradients hardly change over those k steps. That fails while
    weights change quickly, hence the warm-up, and it fails for very large batches (beyond 8,192
    images in the paper).

    The argument is one about SGD. Adam divides the gradient by its own size, so there the square
    root of k is the more common choice.

    Parameters
    ----------
    base_rate : float
        A rate that is known to train well with `base_batch`.
    base_batch, batch : int
        Samples (or tokens) per *global* batch, over all ranks and microbatches.

    Raises
    ------
    ValueError
        If a batch size is not positive.

    References
    ----------
    Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", section 2.1;
    warm-up: 2.2.
    """
    if base_batch < 1 or batch < 1:
        raise ValueError(
            f"base_batch = {base_batch}, batch = {batch}: batch sizes must be positive"
        )
    return base_rate * batch / base_batch
