"""What a run says about itself: a line a step for people, an object a step for programs."""

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minidist.model.moe import Load
from minidist.trainer.files import FileError, at, parse_tree

# Dense bfloat16 FLOP/s of one device, from the makers' data sheets.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "V100": 125e12, "L40S": 362e12, "A10G": 125e12}


@dataclass(frozen=True)
class StepMetrics:
    """One step, counted from 1. `loss` in nats a token; times in seconds; `communication` is a share of `seconds`.

    `load` is that of the experts, if there are some. `bubble` is the share of a pipeline's time in which ranks were
    idle, as measured, and `planned_bubble` that of its plan, whose stages all take the same time; `planned_utilisation`
    is what the planner predicts. `eval_loss` is that on held-out text after this step, if it was measured.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    tokens_per_second: float
    communication: float
    utilisation: float | None = None
    load: Load | None = None
    bubble: float | None = None
    planned_bubble: float | None = None
    planned_utilisation: float | None = None
    eval_loss: float | None = None


def known_peak(device_name: str) -> float:
    """Return the peak FLOP/s of a GPU by its name, or 0 if it is not known."""
    return next((peak for name, peak in PEAKS.items() if name in device_name), 0.0)


class Reporter:
    """Prints and records steps, on rank 0.

    Parameters
    ----------
    steps, first_step : int
        Steps of the whole run, and steps that were taken before it was resumed.
    file : Path, optional
        Where each step becomes a line of JSON. Steps that a killed run wrote there after its last checkpoint are
        removed first, because they happen again.
    label, every
        Printed before each line; print every so many steps.
    """

    def __init__(self, steps: int, file: Path | None, first_step: int, label: str = "", every: int = 1) -> None:
        self.steps, self.first_step, self.label, self.every = steps, first_step, label, every
        self.started = time.perf_counter()
        self.file = file
        if file is not None and first_step == 0:
            file.write_text("")
        elif file is not None and file.is_file():
            unfinished = file.with_name(file.name + ".unfinished")
            unfinished.write_text("".join(_lines_until(file, first_step)))
            unfinished.replace(file)

    def step(self, metrics: StepMetrics) -> None:
        """Report one step."""
        if self.file is not None:
            self._record(self.file, metrics)
        if metrics.step % self.every == 0:
            print(self._line(metrics), flush=True)
        if metrics.eval_loss is not None:
            print(
                f"{self.label}step {metrics.step}/{self.steps}  loss on held-out text {metrics.eval_loss:.4f}",
                flush=True,
            )

    def _record(self, file: Path, metrics: StepMetrics) -> None:
        numbers = {name: value for name, value in vars(metrics).items() if not isinstance(value, Load)}
        fields = {name: value if value is None or math.isfinite(value) else None for name, value in numbers.items()}
        fields |= metrics.load._asdict() if metrics.load else {}
        try:
            with file.open("a") as lines:
                lines.write(json.dumps(fields) + "\n")
        except OSError as error:  # no reason to lose the run
            print(f"minidist train: {file} takes no more metrics ({error.strerror}): going on without", file=sys.stderr)
            self.file = None

    def _line(self, m: StepMetrics) -> str:
        done = m.step - self.first_step
        left = int((time.perf_counter() - self.started) / done * (self.steps - m.step))
        utilisation = f"  mfu {m.utilisation:5.1%}" if m.utilisation is not None else ""
        utilisation += f" (plan {m.planned_utilisation:.1%})" if m.planned_utilisation is not None else ""
        experts = (
            f"  load {m.load.imbalance:.2f}  dropped {m.load.dropped}  entropy {m.load.entropy:.2f}" if m.load else ""
        )
        bubble = f"  bubble {m.bubble:4.0%} (plan {m.planned_bubble:.0%})" if m.bubble is not None else ""
        width = len(str(self.steps))
        return (
            f"{self.label}step {m.step:{width}}/{self.steps}  loss {m.loss:.4f}  norm {m.gradient_norm:.3f}  "
            f"{m.tokens_per_second:9,.0f} tokens/s{utilisation}{experts}{bubble}  "
            f"communication {m.communication:4.0%}  left {left // 60}:{left % 60:02d}"
        )


def _lines_until(file: Path, step: int) -> Iterator[str]:
    """Yield the whole lines of the first `step` steps: the last line of a killed run may be half a line."""
    for line in file.read_text(errors="replace").splitlines(keepends=True):
        with contextlib.suppress(FileError):
            if at(parse_tree(line), "step", kind=int) <= step and line.endswith("\n"):
                yield line
