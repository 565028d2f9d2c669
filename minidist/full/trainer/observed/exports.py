"""Metrics for other programs: TensorBoard's files, and Prometheus, which reads a page or a file.

Each number of a step is named here once. What has several values, such as bytes by axis, is a tag
below a name for TensorBoard, and a label for Prometheus.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minidist.full.data.files import retold
from minidist.full.options import Limit, read_number
from minidist.full.trainer.config import ConfigError
from minidist.full.trainer.metrics import Export, StepMetrics

SHOWN = 10.0  # seconds after which TensorBoard finds what was written
BETWEEN = 1.0  # seconds between two writings of a file, which is read less often
PORT = Limit("from 1 to 65535", lambda value: 1 <= value <= 65535)


class Named(NamedTuple):
    """What a number is called, in which unit, and what its label is, if it has one."""

    name: str
    help: str
    label: str = ""


NUMBERS = {
    "step": Named("minidist_step", "optimizer steps that are done"),
    "loss": Named("minidist_loss", "loss of the step, nats a token"),
    "eval_loss": Named("minidist_eval_loss", "loss on held-out text, nats a token"),
    "gradient_norm": Named("minidist_gradient_norm", "norm of the gradients before clipping"),
    "learning_rate": Named("minidist_learning_rate", "learning rate of the step"),
    "seconds": Named("minidist_step_seconds", "seconds of the step"),
    "tokens_per_second": Named("minidist_tokens_per_second", "tokens a second, over all ranks"),
    "utilisation": Named("minidist_mfu", "model's operations beside the peak of all devices"),
    "communication": Named("minidist_communication_share", "share of the step in messages"),
    "bubble": Named("minidist_bubble_share", "share of the step that a pipeline's ranks idle"),
    "compute_seconds": Named("minidist_compute_seconds", "longest computing of a rank in the step"),
    "compute_median": Named("minidist_compute_median_seconds", "median computing of the ranks"),
    "compute_rank": Named("minidist_compute_rank", "the rank that has computed longest"),
    "straggler": Named("minidist_straggler_rank", "the rank that is slow for long; -1: none"),
    "straggler_times": Named(
        "minidist_straggler_times", "how many times as long that rank computes"
    ),
    "sent": Named("minidist_sent_bytes", "bytes that rank 0 has sent since it started", "axis"),
    "memory": Named("minidist_memory_bytes", "bytes that rank 0 holds after a step", "category"),
}
"""By the field of a step's metrics."""


def values_of(metrics: StepMetrics) -> Iterator[tuple[str, str, float]]:
    """Yield field, label (or "") and value of all numbers of a step that are there."""
    fields = vars(metrics) | (metrics.computing._asdict() if metrics.computing else {})
    if metrics.computing and metrics.computing.straggler is None:
        fields["straggler"] = -1
    for name, named in NUMBERS.items():
        value = fields.get(name)
        several = value.items() if named.label and value else [("", value)]
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


@dataclass
class Prometheus:
    """Shows the last step to Prometheus: on a page at a port, or in a file for its node exporter.

    Parameters
    ----------
    where : str
        A port, or a file.
    """

    where: str
    gauges: dict[str, Any] = field(default_factory=dict)
    server: Any = None
    thread: Any = None
    written: float = float("-inf")
    refused: bool = False  # which is told once

    def __post_init__(self) -> None:
        with _installed("--prometheus", self.where, "prometheus-client"):
            import prometheus_client as client
        self.client, self.registry = client, client.CollectorRegistry()
        if not self.where.removeprefix("-").isdecimal():
            return
        with retold(ConfigError, ValueError, OSError, before=f"--prometheus {self.where}: "):
            port = read_number(self.where, int, PORT)
            self.server, self.thread = client.start_http_server(port, registry=self.registry)

    def step(self, metrics: StepMetrics) -> None:
        """Show a step in place of the last one."""
        for name, label, value in values_of(metrics):
            if name not in self.gauges:  # a number that a run does not have is not shown as 0
                said = NUMBERS[name]
                labels = [said.label] if said.label else []
                made = self.client.Gauge(said.name, said.help, labels, registry=self.registry)
                self.gauges[name] = made
            gauge = self.gauges[name].labels(label) if label else self.gauges[name]
            gauge.set(value)
        if self.server is None and time.monotonic() > self.written + BETWEEN:
            self.write()

    def write(self) -> None:
        """Write the file."""
        self.written = time.monotonic()
        try:
            self.client.write_to_textfile(self.where, self.registry)
            self.refused = False
        except OSError as error:  # no reason to lose the run
            if not self.refused:
                print(
                    f"minidist train: --prometheus {self.where} takes no more ({error.strerror})",
                    file=sys.stderr,
                )
            self.refused = True

    def close(self) -> None:
        """Show nothing any more; a file stays, with the last step."""
        if self.server is None:
            self.write()
        else:
            self.server.shutdown()
            self.server.server_close()
            self.thread.join()


def exports_of(tensorboard: str, prometheus: str, first_step: int) -> list[Export]:
    """Return what steps are told to, as `--tensorboard` and `--prometheus` ask. On rank 0.

    Raises
    ------
    ConfigError
        If a library is missing, the folder cannot be written, or the port is taken.
    """
    found: list[Export] = []
    if tensorboard:
        found.append(TensorBoard(tensorboard, first_step))
    if prometheus:
        found.append(Prometheus(prometheus))
    return found


def _installed(option: str, value: str, package: str) -> Any:
    before = f"{option} {value} needs the library `{package}` ("
    after = f"): pip install {package}, or leave {option} out"
    return retold(ConfigError, ImportError, before=before, after=after)
