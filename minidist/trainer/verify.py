"""`--verify`: the same run again, on one rank and with no strategy at all. Are the parameters the same?

float64    for each parameter max|a - b| <= 1e-9 max|b|: the order of a sum may differ, nothing else
float32    distance to the float64 serial run at most twice that of the float32 serial run: rounding is all there is
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from minidist.comm import Communicator, run
from minidist.mesh import Layout, Mesh
from minidist.trainer.config import Config
from minidist.trainer.loop import Trainer
from minidist.trainer.metrics import Reporter
from minidist.trainer.text import Samples

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Verdict:
    """Whether the run equals the serial one, and by how much it differs."""

    same: bool
    difference: float
    criterion: str


def serial_run(config: Config, samples: Samples, vocabulary: int) -> nn.Module:
    """Train on one rank from the first step on; return the model."""
    alone = replace(
        config,
        parallel=replace(config.parallel, dp=1, accumulate=1),
        run=replace(config.run, save="", save_every=0, resume=False, metrics="", trace="", debug=False),
    )
    reporter = Reporter(config.run.steps, None, 0, label="serial ", every=max(1, config.run.steps // 5))

    def program(comm: Communicator) -> nn.Module:
        return Trainer(alone, samples, vocabulary, Mesh(comm, Layout())).run(reporter).model

    return run(program, 1)[0]


def compare(config: Config, samples: Samples, vocabulary: int, model: nn.Module) -> Verdict:
    """Repeat the run serially and compare `model` with the outcome. One rank calls this."""
    exact = serial_run(replace(config, run=replace(config.run, precision="float64")), samples, vocabulary)
    if config.precision == "float64":
        difference = max(_relative(a, b) for a, b in zip(model.parameters(), exact.parameters(), strict=True))
        return Verdict(difference <= TOLERANCE, difference, f"at most {TOLERANCE:g} for each parameter, in float64")
    rounded = serial_run(config, samples, vocabulary)
    ours, serial = _distance(model, exact), _distance(rounded, exact)
    criterion = f"at most twice that of the serial {config.precision} run, {serial:.2e}, both to the float64 one"
    return Verdict(ours <= 2 * serial, ours, criterion)


def fingerprint(model: nn.Module) -> str:
    """Return a digest of all parameters' bits: ranks that hold the same model have the same."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _relative(ours: Tensor, serial: Tensor) -> float:
    """Return max|a - b| / max|b|; NaN anywhere is an infinite difference."""
    difference = ((ours.detach().cpu() - serial.detach()).abs().max() / serial.detach().abs().max()).item()
    return difference if difference == difference else float("inf")


def _distance(model: nn.Module, exact: nn.Module) -> float:
    """Return the distance of all parameters together, relative to their size."""
    pairs = [
        (a.detach().cpu().double(), b.detach()) for a, b in zip(model.parameters(), exact.parameters(), strict=True)
    ]
    difference = (
        torch.stack([(a - b).norm() for a, b in pairs]).norm() / torch.stack([b.norm() for _, b in pairs]).norm()
    )
    return float(difference)
