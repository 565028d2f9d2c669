"""`--verify`: the same run again, on one rank and with no strategy at all. Are the parameters the
same?

float64    for each parameter max|a - b| <= 1e-9 max|b|: the order of a sum may differ, nothing else
others     distance to the float64 serial run at most twice that of the serial run of the same precision
16 bits    and 2 lr of each step more: Adam moves an element that far whose gradient, near 0, has another sign once
           it is rounded, and goes on so while it remembers it, 1 / (1 - beta1) steps. Later ones are independent, so
           their squares add up. In a tiny model a few such elements are all the distance.

Adam divides a gradient by its own size, so parameters hardly tell whether all gradients are wrong
by a factor (a mean where a sum was meant). The norm of the first gradients does: it has to be the
serial one, too. In 16 bits, up to four times the error of one rounding (2^-8 and 2^-11): roundings
of many elements average out in their norm, which is off by a fifth of one at most in models of 1 to
12 layers, while the mean instead of the sum is off by a half.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from minidist.full.comm import Communicator, run
from minidist.full.data.packed import Packed
from minidist.full.data.text import Samples
from minidist.full.mesh import Layout, Mesh
from minidist.full.trainer.checked import check_run
from minidist.full.trainer.config import Config
from minidist.full.trainer.loop import Outcome, Trainer
from minidist.full.trainer.metrics import Reporter
from minidist.full.trainer.options import MemoryOptions
from minidist.full.trainer.start import start_of

TOLERANCE = 1e-9  # of parameters in float64
NORM_TOLERANCE = {
    "float64": 1e-9,
    "float32": 1e-4,
    "bfloat16": 2.0**-6,
    "float16": 2.0**-9,
    "fp8": 2.0**-4,
    "autocast-bfloat16": 2.0**-6,
    "autocast-float16": 2.0**-9,
}


class Verdict(NamedTuple):
    """Whether the run equals the serial one, and by how much it differs."""

    same: bool
    difference: float
    criterion: str


def serial_run(
    config: Config, samples: Samples | Packed, vocabulary: int, metrics: Path | None = None
) -> Outcome:
    """Train on one rank from the first step on, without a strategy; return what came of it.

    Each step becomes a line of the file `metrics`, if there is one.
    """
    alone = replace(
        config.without_files(), parallel=type(config.parallel)(dp=1), memory=MemoryOptions()
    )
    reporter = Reporter(
        config.run.steps, metrics, 0, label="serial ", every=max(1, config.run.steps // 5)
    )

    def program(comm: Communicator) -> Outcome:
        run = check_run(alone, Mesh(comm, Layout()), vocabulary)
        return Trainer(run, start_of(run, samples)).run(reporter)

    return run(program, 1)[0]


def compare(
    config: Config,
    samples: Samples | Packed,
    vocabulary: int,
    ours: Outcome,
    metrics: Path | None = None,
) -> Verdict:
    """Repeat the run serially, in float64 first, and compare. One rank calls this.

    The steps of the run in float64 go into the file `metrics`.
    """
    exact = serial_run(
        replace(config, run=replace(config.run, precision="float64")), samples, vocabulary, metrics
    )
    reference = exact if config.precision == "float64" else serial_run(config, samples, vocabulary)
    if reference is exact:
        difference, limit = largest_difference(ours.model, exact.model), TOLERANCE
        criterion = f"at most {TOLERANCE:g} for each parameter, in float64"
    else:
        difference, own = (_distance(each.model, exact.model) for each in (ours, reference))
        turned = 0.0
        if config.precision != "float32":
            rates = [step.learning_rate for step in reference.history]
            remembered = 1 / (1 - config.optimizer.beta1)  # steps
            astray = min(sum(rates), math.sqrt(remembered) * math.hypot(*rates))
            turned = 2 * astray / _size(exact.model)
        limit = 2 * own + turned
        criterion = (
            f"at most twice that of the serial {config.precision} run, {own:.2e}, and "
            f"{turned:.2e} for one element in each step, both to the float64 one"
        )
    tolerance = NORM_TOLERANCE[config.precision]
    same_norm = _first_norms_agree(ours, reference, tolerance)
    criterion += (
        "; norm of the first gradients equal to "
        f"{tolerance:g}{'' if same_norm else ', WHICH IT IS NOT'}"
    )
    return Verdict(difference <= limit and same_norm, difference, criterion)


def largest_difference(model: nn.Module, serial: nn.Module) -> float:
    """Return the largest max|a - b| / max|b| of all parameters."""
    return max(
        _relative(a, b) for a, b in zip(model.parameters(), serial.parameters(), strict=True)
    )


def _relative(ours: Tensor, serial: Tensor) -> float:
    """Return max|a - b| / max|b|; NaN anywhere is an infinite difference."""
    a, b = ours.detach().cpu().double(), serial.detach().double()  # bytes, too
    difference = (a - b).abs().max() / b.abs().max().clamp(min=1e-300)
    return float(difference.nan_to_num(math.inf, math.inf))


def _first_norms_agree(ours: Outcome, serial: Outcome, tolerance: float) -> bool:
    """Compare the first step that no overflow left out, unless this run was resumed after it."""
    if not ours.history or ours.history[0].step > 1:
        return True
    for step, same in zip(ours.history, serial.history, strict=True):
        left_out = not (math.isfinite(step.gradient_norm) or math.isfinite(same.gradient_norm))
        if ours.scaler is None or not left_out:
            return abs(step.gradient_norm - same.gradient_norm) <= tolerance * same.gradient_norm
    return True


def _distance(model: nn.Module, exact: nn.Module) -> float:
    """Return the distance of all trained parameters together, relative to their size."""
    both = zip(model.parameters(), exact.parameters(), strict=True)
    pairs = [(a.detach().cpu().double(), b.detach()) for a, b in both if b.requires_grad]
    return math.hypot(*(float((a - b).norm()) for a, b in pairs)) / _size(exact)


def _size(model: nn.Module) -> float:
    """Return the norm of all trained parameters together."""
    return math.hypot(*(float(b.detach().norm()) for b in model.parameters() if b.requires_grad))
