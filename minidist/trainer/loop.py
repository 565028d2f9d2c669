"""The training loop: one, for every number of ranks.

    batch ─▶ microbatches ─▶ forward, backward, ... ─▶ gradients made equal ─▶ clip ─▶ AdamW ─▶ next batch

Each rank takes its rows of the global batch and divides its loss by the tokens of the *global* batch: summed gradients
are then those of the serial run, whatever the number of ranks and microbatches. In 16 bits AdamW updates float32
masters; in float16 the loss is scaled, and a step in which a gradient overflows on any rank is left out on all.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minidist.collectives import all_reduce
from minidist.comm import Communicator
from minidist.memory.account import Account
from minidist.memory.precision import LossScaler
from minidist.memory.recompute import recompute
from minidist.mesh import Mesh
from minidist.model import GPT, Where, cross_entropy_sum
from minidist.parallel import FSDP, DataParallel, clip_by_global_norm
from minidist.parallel.sampler import State
from minidist.parallel.shard import Sharded
from minidist.trainer import checkpoint
from minidist.trainer.batches import Batch, Batches, ReadAhead
from minidist.trainer.checkpoint import CheckpointError
from minidist.trainer.config import Config, ConfigError, Sections
from minidist.trainer.metrics import Reporter, StepMetrics, known_peak
from minidist.trainer.optimizer import build_optimizer
from minidist.trainer.replicate import check_room, replicate
from minidist.trainer.schedule import learning_rate, linear_scaling
from minidist.trainer.text import Samples


@dataclass
class Outcome:
    """What a run leaves behind on this rank."""

    model: GPT
    history: list[StepMetrics]
    gradient_bytes_sent: int
    scaler: LossScaler | None = None


class Trainer:
    """One run, on one rank of `mesh`. With a mesh of one rank it is the serial run: the bare model and no strategy.

    Making one sends nothing, so ranks can still agree on whether to start.

    Raises
    ------
    CheckpointError
        If the run is to be resumed and cannot be.
    """

    def __init__(self, config: Config, samples: Samples, vocabulary: int, mesh: Mesh) -> None:
        self.config, self.mesh, self.comm = config, mesh, mesh.world
        self.device = device_of(self.comm)
        generator = torch.Generator().manual_seed(config.run.seed)
        dtype = getattr(torch, config.precision)
        self.model = GPT(config.gpt(vocabulary), generator, dtype=dtype, device=self.device)
        self.optimizer = build_optimizer(self.model, config)  # a checkpoint is loaded into it; `run` places its state
        self.scaler = LossScaler(self.comm) if dtype == torch.float16 else None
        self.replica: DataParallel | None = None  # from `run` on, if there are several ranks
        dp, by_length = mesh.dp, config.data.by_length
        self.batches = Batches(samples, config.data.batch, dp.size, dp.rank, config.run.seed, by_length=by_length)
        self.changed: list[str] = []  # options that are not what they were before this run was resumed
        self.first_step = self._resume() if config.run.resume else 0
        base_batch = config.optimizer.base_batch or config.data.batch
        self.peak_rate = linear_scaling(config.optimizer.lr, base_batch, config.data.batch)

    def run(self, reporter: Reporter | None = None, account: Account | None = None) -> Outcome:
        """Train to the last step, telling `reporter` of each; return what came of it. Collective.

        An `account` watches the last step, which then is slow.

        Raises
        ------
        CheckpointError
            On every rank, if one cannot be written.
        ConfigError
            On every rank, if the folder of the offloaded state has no room.
        FloatingPointError
            On every rank, if gradients overflow at every loss scale.
        """
        run, dp = self.config.run, self.mesh.dp
        self._apply_strategies(dp)
        sent = 0
        history: list[StepMetrics] = []
        with self._overflow_expected(), ReadAhead(self.batches, pin=self.device.type == "cuda") as batches:
            for step, batch in zip(range(self.first_step, run.steps), batches, strict=False):
                sent -= dp.traffic.bytes_sent
                watched = account if step + 1 == run.steps else None
                with self._watching(watched) if watched else contextlib.nullcontext():
                    history.append(self._measured_step(step, batch.to(self.device)))
                sent += dp.traffic.bytes_sent
                if reporter is not None:
                    reporter.step(history[-1])
                due = step + 1 == run.steps or (run.save_every and (step + 1) % run.save_every == 0)
                if run.save and due:
                    self._save(step + 1, batches.state_dict())
        if isinstance(self.replica, FSDP):
            self.replica.unwrap()  # the outcome is a whole model
        return Outcome(self.model, history, sent, self.scaler)

    def step(self, step: int, batch: Batch, rate: float) -> tuple[float, float]:
        """Take one optimizer step; return the loss per token of the global batch, and the norm of the gradients."""
        model = self.replica or self.model
        model.zero_grad()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        parts = batch.microbatches(self.config.parallel.accumulate)
        for number, part in enumerate(parts):
            alone = self.replica is not None and number + 1 < len(parts)
            with self.replica.no_sync() if alone and self.replica else contextlib.nullcontext():
                loss += self._forward_backward(model, step, part)
        if self.replica is not None:
            self.replica.synchronize()
        all_reduce(loss, self.comm)
        with self.comm.span("optimizer"):
            norm = self._update(rate)
        return float(loss), norm

    def _update(self, rate: float) -> float:
        """Clip and step, unless a gradient overflowed on some rank; return the norm of the gradients, unscaled."""
        updated = self.replica.slices if isinstance(self.replica, Sharded) else self.model.parameters()
        measured = clip_by_global_norm(updated, 0)  # of gradients in 16 bits: the step widens them before it clips
        overflow, scale = False, 1.0
        if self.scaler is not None:
            overflow, scale = self.scaler.overflowed(measured), self.scaler.scale
            self.scaler.update(overflow)
        norm, limit = float(measured) / scale, self.config.optimizer.clip
        clipping = min(1.0, limit / (norm + 1e-6)) if limit and math.isfinite(norm) else 1.0
        if not overflow:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step(factor=clipping / scale)
        return norm

    def _forward_backward(self, model: nn.Module, step: int, part: Batch) -> Tensor:
        where = Where(self.config.run.seed, step, part.first_row)
        with self.comm.span("forward"):
            loss = cross_entropy_sum(model(part.inputs, where), part.targets) / part.tokens
        with self.comm.span("backward"):
            scaled = self.scaler.scale_loss(loss) if self.scaler else loss
            scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach().double()

    def _measured_step(self, step: int, batch: Batch) -> StepMetrics:
        started, waited = time.perf_counter(), self.comm.traffic.seconds
        total = self.config.run.steps
        rate = learning_rate(step, self.peak_rate, min(self.config.optimizer.warmup, total), total)
        loss, norm = self.step(step, batch, rate)
        seconds = time.perf_counter() - started
        speed = batch.tokens / seconds
        share = (self.comm.traffic.seconds - waited) / seconds
        return StepMetrics(step + 1, loss, norm, rate, seconds, speed, share, self._utilisation(speed))

    def _utilisation(self, tokens_per_second: float) -> float | None:
        peak = self.config.run.peak_tflops * 1e12
        if not peak and self.device.type == "cuda":
            peak = known_peak(torch.cuda.get_device_name(self.device))
        needed = self.model.flops_per_token(self.config.data.sequence) * tokens_per_second
        return needed / (peak * self.comm.size) if peak else None

    def _save(self, step: int, position: State) -> None:
        """Have rank 0 write a checkpoint. If it cannot, every rank raises what it says."""
        run = self.config.run
        state = {"batches": position, "config": self.config.sections(), "model": asdict(self.model.config)}
        state["scaler"] = self.scaler.state_dict() if self.scaler else None
        moments = checkpoint.flat_state(self.optimizer)

        def write() -> None:
            if self.comm.rank == 0:
                checkpoint.save(Path(run.save), step, self.model, moments, state, run.keep)

        with self.replica.gathered() if isinstance(self.replica, FSDP) else contextlib.nullcontext():
            self._all_or_none(write, CheckpointError)

    def _watching(self, account: Account) -> contextlib.AbstractContextManager[None]:
        account.watch(self.replica or self.model, self.optimizer, self.comm)
        if stream := getattr(self.replica, "stream", None):
            account.watch(comm=stream.comm)
        return account.recording()

    def _apply_strategies(self, dp: Communicator) -> None:
        """Replicate or shard the model, have it recompute, and bring the optimizer's state to where it lives."""
        loaded = self.optimizer.state_dict()
        del self.optimizer  # an optimizer over whole parameters must not outlive their being sharded
        if dp.size > 1:
            self._all_or_none(lambda: check_room(self.model, dp, self.config), ConfigError)
            self.replica = replicate(self.model, dp, self.config)
        recompute(self.model, self.config.memory.recompute)

        def place() -> None:
            try:
                self.optimizer = build_optimizer(self.model, self.config, self.replica, self.config.offload_to)
                if loaded["state"]:
                    self.optimizer.load_state_dict(loaded)
            except OSError as error:
                raise ConfigError(f"--offload disk: {error.strerror}") from None

        self._all_or_none(place, ConfigError)

    def _overflow_expected(self) -> contextlib.AbstractContextManager[Any]:
        """Keep numpy from warning of an overflow in reducing, if there is a scaler to deal with it."""
        if self.scaler is None:
            return contextlib.nullcontext()
        stream = getattr(self.replica, "stream", None)
        if stream is not None:
            stream.launch(_ignore_overflow).wait()  # each thread has settings of its own
        return np.errstate(over="ignore", invalid="ignore")

    def _all_or_none(self, work: Callable[[], None], refused: type[ValueError]) -> None:
        """Do `work`, which sends nothing; if it is refused on one rank, every rank raises what that one was told."""
        problem = ""
        try:
            work()
        except refused as error:
            problem = str(error)
        if problem := next(filter(None, self.comm.roll_call(problem)), ""):
            raise refused(problem)

    def _resume(self) -> int:
        """Load the newest checkpoint; return the number of steps it has behind it."""
        path = checkpoint.newest(Path(self.config.run.save))
        state = checkpoint.load(path, self.model, self.optimizer)
        for name, now in asdict(self.model.config).items():
            if name != "dropout" and state["model"].get(name) != now:
                raise CheckpointError(
                    f"{path} belongs to another model: {name} is {state['model'].get(name)} there and {now} here: use "
                    f"the options it was trained with, or another --save"
                )
        try:
            self.batches.load_state_dict(state["batches"])
        except ValueError as error:
            raise CheckpointError(f"{path} cannot be continued: {error}") from None
        step = int(state["step"])
        if step > self.config.run.steps:
            raise CheckpointError(
                f"{path} has {step} steps behind it, more than --steps {self.config.run.steps}: use --steps {step} to "
                f"look at it, or more to train on"
            )
        if self.scaler is not None and state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])
        self.changed = changed_options(state["config"], self.config.sections())
        return step


def _ignore_overflow() -> None:
    np.seterr(over="ignore", invalid="ignore")


def changed_options(before: Sections, now: Sections) -> list[str]:
    """Return, in words, the options that shape the numbers of a run and are not what they were."""
    names = [("model", "dropout"), ("data", "batch"), ("run", "steps")]
    names += [("optimizer", name) for name in now["optimizer"]]
    old_and_new = [(name, before[section].get(name), now[section][name]) for section, name in names]
    return [f"{name} {old} -> {new}" for name, old, new in old_and_new if old != new]


def device_of(comm: Communicator) -> torch.device:
    """Return where this rank computes: on its GPU if its wire is NCCL, else on the CPU."""
    if getattr(comm, "cuda", None) is not None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
