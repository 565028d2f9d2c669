"""The training loop: one, for every number of ranks.

    batch ─▶ microbatches ─▶ forward, backward, ... ─▶ gradients made equal ─▶ clip ─▶ AdamW ─▶ next batch

Each rank takes its rows of the global batch and divides its loss by the tokens of the *global* batch: summed gradients
are then those of the serial run, whatever the number of ranks and microbatches.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from minidist.collectives import all_reduce
from minidist.comm import Communicator
from minidist.mesh import Mesh
from minidist.model import GPT, Where, cross_entropy_sum
from minidist.parallel import (
    DDP,
    DataParallel,
    NaiveDataParallel,
    ParameterServer,
    ZeRO1,
    ZeRO2,
    clip_by_global_norm,
)
from minidist.parallel.sampler import State
from minidist.trainer import checkpoint
from minidist.trainer.batches import Batch, Batches, ReadAhead
from minidist.trainer.checkpoint import CheckpointError
from minidist.trainer.config import Config, OptimizerOptions, Sections
from minidist.trainer.metrics import Reporter, StepMetrics, known_peak
from minidist.trainer.schedule import learning_rate, linear_scaling
from minidist.trainer.text import Samples

MIB = 1 << 20


@dataclass
class Outcome:
    """What a run leaves behind on this rank."""

    model: GPT
    history: list[StepMetrics]
    gradient_bytes_sent: int


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
        self.optimizer = build_optimizer(self.model, config)
        self.replica: DataParallel | None = None  # from `run` on, if there are several ranks
        dp, by_length = mesh.dp, config.data.by_length
        self.batches = Batches(samples, config.data.batch, dp.size, dp.rank, config.run.seed, by_length=by_length)
        self.changed: list[str] = []  # options that are not what they were before this run was resumed
        self.first_step = self._resume() if config.run.resume else 0
        base_batch = config.optimizer.base_batch or config.data.batch
        self.peak_rate = linear_scaling(config.optimizer.lr, base_batch, config.data.batch)

    def run(self, reporter: Reporter | None = None) -> Outcome:
        """Train to the last step, telling `reporter` of each; return what came of it. Collective.

        Raises
        ------
        CheckpointError
            On every rank, if one cannot be written.
        """
        run, dp = self.config.run, self.mesh.dp
        if dp.size > 1:
            self._replicate(dp)
        sent = 0
        history: list[StepMetrics] = []
        with ReadAhead(self.batches, pin=self.device.type == "cuda") as batches:
            for step, batch in zip(range(self.first_step, run.steps), batches, strict=False):
                sent -= dp.traffic.bytes_sent
                history.append(self._measured_step(step, batch.to(self.device)))
                sent += dp.traffic.bytes_sent
                if reporter is not None:
                    reporter.step(history[-1])
                due = step + 1 == run.steps or (run.save_every and (step + 1) % run.save_every == 0)
                if run.save and due:
                    self._save(step + 1, batches.state_dict())
        return Outcome(self.model, history, sent)

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
            updated = self.replica.slices if isinstance(self.replica, ZeRO1) else self.model.parameters()
            norm = clip_by_global_norm(updated, self.config.optimizer.clip)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        return float(loss), float(norm)

    def _forward_backward(self, model: nn.Module, step: int, part: Batch) -> Tensor:
        where = Where(self.config.run.seed, step, part.first_row)
        with self.comm.span("forward"):
            loss = cross_entropy_sum(model(part.inputs, where), part.targets) / part.tokens
        with self.comm.span("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
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
        problem, run = "", self.config.run
        state = {"batches": position, "config": self.config.sections(), "model": asdict(self.model.config)}
        moments = checkpoint.flat_state(self.optimizer)
        if self.comm.rank == 0:
            try:
                checkpoint.save(Path(run.save), step, self.model, moments, state, run.keep)
            except CheckpointError as error:
                problem = str(error)
        problem = self.comm.roll_call(problem)[0]
        if problem:
            raise CheckpointError(problem)

    def _replicate(self, comm: Communicator) -> None:
        """Apply the strategy. If it shards, an optimizer that does takes over what this one has loaded."""
        loaded = self.optimizer.state_dict()
        if self.config.parallel.zero:
            del self.optimizer  # an optimizer over whole parameters cannot go on
        self.replica = replicate(self.model, comm, self.config)
        if isinstance(self.replica, ZeRO1):
            options = self.config.optimizer
            self.optimizer = self.replica.optimizer(
                torch.optim.AdamW, decay_groups(self.model, options.weight_decay), **adamw_options(options)
            )
            if loaded["state"]:
                self.optimizer.load_state_dict(loaded)

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
        self.changed = changed_options(state["config"], self.config.sections())
        return step


def changed_options(before: Sections, now: Sections) -> list[str]:
    """Return, in words, the options that shape the numbers of a run and are not what they were."""
    names = [("model", "dropout"), ("data", "batch"), ("run", "steps")]
    names += [("optimizer", name) for name in now["optimizer"]]
    old_and_new = [(name, before[section].get(name), now[section][name]) for section, name in names]
    return [f"{name} {old} -> {new}" for name, old, new in old_and_new if old != new]


def replicate(model: nn.Module, comm: Communicator, config: Config) -> DataParallel:
    """Apply the data-parallel variant that the configuration names."""
    if config.parallel.strategy == "naive":
        return NaiveDataParallel(model, comm)
    if config.parallel.strategy == "server":
        return ParameterServer(model, comm)
    kind = (DDP, ZeRO1, ZeRO2)[config.parallel.zero]
    return kind(model, comm, bucket_bytes=int(config.parallel.bucket_mib * MIB))


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices and leaves norms alone."""
    options = config.optimizer
    return torch.optim.AdamW(decay_groups(model, options.weight_decay), **adamw_options(options))


def adamw_options(options: OptimizerOptions) -> dict[str, Any]:
    """Return what all groups of parameters have in common."""
    return {"lr": options.lr, "betas": (options.beta1, options.beta2)}


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the matrices, which are decayed, and the other parameters."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def device_of(comm: Communicator) -> torch.device:
    """Return where this rank computes: on its GPU if its wire is NCCL, else on the CPU."""
    if getattr(comm, "cuda", None) is not None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
