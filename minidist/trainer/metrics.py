"""What a run says about itself: a line a step for people, an object a step for programs."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

# Dense bfloat16 FLOP/s of one device, from the makers' data sheets.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "V100": 125e12, "L40S": 362e12, "A10G": 125e12}


@dataclass(frozen=True)
class StepMetrics:
    """One step. `loss` in nats a token; times in seconds; `communication` is a share of `seconds`."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    tokens_per_second: float
    communication: float
    utilisation: float | None = None


def known_peak(device_name: str) -> float:
    """Return the peak FLOP/s of a GPU by its name, or 0 if it is not known."""
    return next((peak for name, peak in PEAKS.items() if name in device_name), 0.0)


class Reporter:
    """Prints and records steps, on rank 0."""

    def __init__(self, steps: int, file: Path | None, first_step: int, label: str = "", every: int = 1) -> None:
        self.steps, self.first_step, self.label, self.every = steps, first_step, label, every
        self.started = time.perf_counter()
        self.file: TextIO | None = None
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            kept = _lines_before(file, first_step) if first_step else []
            file.write_text("".join(kept))  # what a killed run wrote beyond its checkpoint happens again
            self.file = file.open("a")

    def step(self, metrics: StepMetrics) -> None:
        """Report one step."""
        if self.file is not None:
            self.file.write(json.dumps(asdict(metrics)) + "\n")
            self.file.flush()
        if (metrics.step + 1) % self.every == 0:
            print(self._line(metrics), flush=True)

    def _line(self, m: StepMetrics) -> str:
        done = m.step + 1 - self.first_step
        left = (time.perf_counter() - self.started) / done * (self.steps - m.step - 1)
        utilisation = f"  mfu {m.utilisation:5.1%}" if m.utilisation is not None else ""
        width = len(str(self.steps))
        return (
            f"{self.label}step {m.step + 1:{width}}/{self.steps}  loss {m.loss:.4f}  norm {m.gradient_norm:.3f}  "
            f"{m.tokens_per_second:9,.0f} tokens/s{utilisation}  communication {m.communication:4.0%}  "
            f"left {int(left) // 60}:{int(left) % 60:02d}"
        )


def _lines_before(file: Path, step: int) -> list[str]:
    if not file.exists():
        return []
    lines = file.read_text().splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < step]
