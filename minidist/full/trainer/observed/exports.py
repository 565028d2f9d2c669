"""Metrics for TensorBoard. What has several values, such as bytes by axis, is a tag below a name."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minidist.full.data.files import retold
from minidist.full.trainer.config import ConfigError
from minidist.full.trainer.metrics import Export, StepMetrics

SHOWN = 10.0  # seconds after which TensorBoard finds what was written


NUMBERS = (
    *("step", "loss", "eval_loss", "gradient_norm", "learning_rate", "seconds"),
    *("tokens_per_second", "utilisation", "communication", "bubble"),
    *("compute_seconds", "compute_median", "compute_rank", "straggler", "straggler_times"),
    *("sent", "memory"),
)
"""The fields of a step's metrics, and of those of its computing."""


def values_of(metrics: StepMetrics) -> Iterator[tuple[str, str, float]]:
    """Yield field, label (or "") and value of all numbers of a step that are there."""
    fields = vars(metrics) | (metrics.computing._asdict() if metrics.computing else {})
    if metrics.computing and metrics.computing.straggler is None:
        fields["straggler"] = -1
    for name in NUMBERS:
        value = fields.get(name)
        several = value.items() if isinstance(value, dict) else [("", value)]
        for label, number in several:
            if isinstance(number, int | float) and math.isfinite(number):
                yield name, label, number


class TensorBoard:
    """Writes files that TensorBoard shows. Steps of a run that is resumed take the place of those
    that were begun before.

    `tensorboardX.SummaryWriter` is not used: its thread ends when the disk is full, and its queue
    then blocks whoever adds to it.
    """

    def __init__(self, folder: str, first_step: int) -> None:
        with _installed("--tensorboard", folder, "tensorboardX"):
            from tensorboardX.event_file_writer import (  # type: ignore[import-untyped]
                EventsWriter,
            )
            from tensorboardX.proto.event_pb2 import (  # type: ignore[import-untyped]
                Event,
                SessionLog,
            )
            from tensorboardX.record_writer import (  # type: ignore[import-untyped]
                directory_check,
            )
        self.record, self.folder, self.flushed = Event, folder, time.monotonic()
        begin = SessionLog(status=SessionLog.START)
        with retold(ConfigError, OSError, before=f"--tensorboard {folder}: "):
            directory_check(folder)
            self.writer = EventsWriter(f"{folder}/events")
        self._write(Event(step=first_step + 1, session_log=begin))

    def step(self, metrics: StepMetrics) -> None:
        """Write the numbers of a step."""
        event = self.record(step=metrics.step)
        for name, label, value in values_of(metrics):
            event.summary.value.add(tag=f"{name}/{label}" if label else name, simple_value=value)
        self._write(event)

    def close(self) -> None:
        """Write what is left."""
        if self.writer is not None:
            with self._going_on():
                self.writer.close()

    def _write(self, event: Any) -> None:
        if self.writer is None:
            return
        event.wall_time = time.time()
        with self._going_on():
            self.writer.write_event(event)
            if time.monotonic() > self.flushed + SHOWN:
                self.writer.flush()
                self.flushed = time.monotonic()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Write no more once the disk refuses, which is no reason to lose the run."""
        try:
            yield
        except OSError as error:
            self.writer = None
            print(
                f"minidist train: --tensorboard {self.folder} takes no more ({error.strerror}): "
                "going on without",
                file=sys.stderr,
            )


def exports_of(tensorboard: str, first_step: int) -> list[Export]:
    """Return what steps are told to, as `--tensorboard` asks. On rank 0.

    Raises
    ------
    ConfigError
        If a library is missing, or the folder cannot be written.
    """
    return [TensorBoard(tensorboard, first_step)] if tensorboard else []


def _installed(option: str, value: str, package: str) -> Any:
    before = f"{option} {value} needs the library `{package}` ("
    after = f"): pip install {package}, or leave {option} out"
    return retold(ConfigError, ImportError, before=before, after=after)
