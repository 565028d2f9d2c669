"""What a run says about itself: some forty lines for people, an object a step for programs.

    step 250/250  loss 1.7935  norm 1.23  13,549 tokens/s  left 0:00  waiting 12%

On a terminal that line stays in place, and shows every step. Elsewhere, as under `mpirun`, lines
follow each other.
"""

import contextlib
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from minidist.full.data.files import FileError, at, parse_tree
from minidist.full.model.moe.balance import Load
from minidist.full.trainer.observed.stragglers import Computing

WIDTH = 80  # columns of a line
LINES = 40  # of a whole run, about, unless somebody says otherwise

# Dense bfloat16 FLOP/s of one device, from the makers' data sheets.
PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "V100": 125e12,
    "L40S": 362e12,
    "A10G": 125e12,
}


@dataclass(frozen=True)
class StepMetrics:
    """One step, counted from 1.

    `loss` in nats a token; times in seconds; `communication` is a share of `seconds`.

    `load` is that of the experts, if there are some. `bubble` is the share of a pipeline's time in
    which ranks were idle, as measured, and `planned_bubble` that of its plan, whose stages all take
    the same time. `eval_loss` is that on
    held-out text after this step, if it was measured.

    Of a run that is observed (`--tensorboard`): `computing` is how long
    the ranks have computed, `sent` the bytes that rank 0 has sent since it started, by axis, and
    `memory` those that it holds, by category.
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
    eval_loss: float | None = None
    computing: Computing | None = None
    sent: dict[str, int] | None = None
    memory: dict[str, int] | None = None


def known_peak(device_name: str) -> float:
    """Return the peak FLOP/s of a GPU by its name, or 0 if it is not known."""
    return next((peak for name, peak in PEAKS.items() if name in device_name), 0.0)


class Export(Protocol):
    """Something that steps are told to, on rank 0."""

    def step(self, metrics: StepMetrics) -> None: ...

    def close(self) -> None: ...


class Reporter:
    """Prints and records steps, on rank 0.

    Parameters
    ----------
    steps, first_step : int
        Steps of the whole run, and steps that were taken before it was resumed.
    file : Path, optional
        Where each step becomes a line of JSON. Steps that a killed run wrote there after its last
        checkpoint are removed first, because they happen again.
    label : str
        Printed before each line.
    every : int
        Print every so many steps, and the last one; 0: so that there are about `LINES` lines.
    in_place : bool
        Print every step over the one before it.
    exports : sequence of Export
        To whom else each step is told.
    """

    def __init__(
        self,
        steps: int,
        file: Path | None,
        first_step: int,
        label: str = "",
        every: int = 0,
        in_place: bool = False,
        exports: Sequence[Export] = (),
    ) -> None:
        self.exports = exports
        self.steps, self.first_step, self.label = steps, first_step, label
        self.every, self.in_place = every or -(-steps // LINES), in_place
        self.started = time.perf_counter()
        self.file, self.recorded = file, 0
        if file is not None:
            with self._going_on(file):
                self.recorded = _rewind(file, first_step)

    def step(self, metrics: StepMetrics) -> None:
        """Report one step, unless that was done before the run was resumed."""
        if metrics.step <= self.recorded:
            return
        for export in self.exports:
            export.step(metrics)
        fields = _fields(metrics)
        if self.file is not None:
            self._record(self.file, fields)
        last = metrics.step == self.steps
        if self.in_place:
            print(self._over(self._lines(metrics)[0]), end="\n" if last else "", flush=True)
        elif last or metrics.step % self.every == 0:
            print("\n".join(self._lines(metrics)), flush=True)
        if metrics.eval_loss is not None:
            measured = (
                f"{self.label}{self._step(metrics)}  loss on held-out text {metrics.eval_loss:.4f}"
            )
            print(self._over(measured) if self.in_place and not last else measured, flush=True)

    def _over(self, line: str) -> str:
        """Return a line that takes the place of the one on which the cursor stands: it must not
        reach the border.
        """
        width = min(WIDTH, shutil.get_terminal_size().columns) - 1
        return f"\r{line[:width]:<{width}}"

    def _record(self, file: Path, fields: dict[str, Any]) -> None:
        with self._going_on(file), file.open("a") as lines:
            lines.write(json.dumps(fields) + "\n")

    @contextlib.contextmanager
    def _going_on(self, file: Path) -> Iterator[None]:
        """Record no more once the disk refuses, which is no reason to lose the run."""
        try:
            yield
        except OSError as error:
            print(
                f"minidist train: {file} takes no more metrics ({error.strerror}): going on "
                "without",
                file=sys.stderr,
            )
            self.file = None

    def _step(self, metrics: StepMetrics) -> str:
        return f"step {metrics.step:{len(str(self.steps))}}/{self.steps}"

    def _lines(self, m: StepMetrics) -> list[str]:
        """Return what people read about a step: one line, and further ones for what only some runs
        have.
        """
        done = m.step - self.first_step
        each = (time.perf_counter() - self.started) / done if done else 0.0
        left = int(each * (self.steps - m.step))
        first = [
            f"{self.label}{self._step(m)}",
            f"loss {m.loss:.4f}",
            f"norm {m.gradient_norm:.2f}",
        ]
        first += [f"{m.tokens_per_second:,.0f} tokens/s", f"left {left // 60}:{left % 60:02d}"]
        if len("  ".join(first)) > WIDTH:  # of a million steps, at a million tokens a second
            del first[-2]
        lines, waiting, parts = ["  ".join(first)], f"  waiting {m.communication:.0%}", []
        # else the summary says it, and the metrics
        if m.communication and len(lines[0] + waiting) <= WIDTH:
            lines[0] += waiting
        if m.utilisation is not None:
            parts.append(f"mfu {m.utilisation:.1%}")
        if m.load:
            parts.append(
                f"load {m.load.imbalance:.2f}  dropped {m.load.dropped}  entropy "
                f"{m.load.entropy:.2f}"
            )
        if m.computing and m.computing.straggler_times is not None:
            slow, times = m.computing.straggler, m.computing.straggler_times
            parts.append(f"rank {slow} is slow: it computes {times:.1f} times as long")
        if m.bubble is not None:
            parts.append(f"bubble {m.bubble:.0%} (plan {m.planned_bubble:.0%})")
        for part in parts:
            if len(lines) > 1 and len(lines[-1]) + 2 + len(part) <= WIDTH:
                lines[-1] += f"  {part}"
            else:
                lines.append(f"    {part}")
        return lines


def _fields(metrics: StepMetrics) -> dict[str, Any]:
    """Return a step as JSON has it, which knows no numbers beyond all bounds."""
    fields = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in vars(metrics).items()
        if not isinstance(value, Load | Computing)
    }
    for several in (metrics.load, metrics.computing):
        fields |= several._asdict() if several else {}
    return fields


def _rewind(file: Path, first_step: int) -> int:
    """Remove what a file has of steps after the first ones; return the last step that it has."""
    if first_step == 0:
        file.write_text("")
    if first_step == 0 or not file.is_file():
        return 0
    unfinished = file.with_name(file.name + ".unfinished")
    lines = list(_lines_until(file, first_step))
    try:
        unfinished.write_text("".join(lines))
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)
    return at(parse_tree(lines[-1]), "step", kind=int) if lines else 0


def _lines_until(file: Path, step: int) -> Iterator[str]:
    """Yield the whole lines of the first `step` steps: the last line of a killed run may be half a
    line.
    """
    for line in file.read_text(errors="replace").splitlines(keepends=True):
        with contextlib.suppress(FileError):
            if at(parse_tree(line), "step", kind=int) <= step and line.endswith("\n"):
                yield line
