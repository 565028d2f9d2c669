"""The training loop: one, for every number of ranks.

    batch ─▶ microbatches ─▶ forward, backward, ... ─▶ gradients made equal ─▶ clip ─▶ AdamW ─▶ next batch

Each rank takes its rows of the global batch and divides its loss by the tokens of the *global*
batch. The sum of the gradients is then that of the serial run, whatever the number of ranks and
microbatches. In 16 bits AdamW updates float32 masters. In float16 the loss is scaled, and all ranks
leave out a step in which a gradient overflows on any.
Sites (`--dcn`) divide by their fair share of the tokens, and hear of each other only when they meet.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minidist.full import Parallel, parallelize
from minidist.full.checkpoint.saving import (
    Writer,
    load_pieces,
    pieces_to_save,
)
from minidist.full.checkpoint.store import CheckpointError
from minidist.full.collectives import all_reduce
from minidist.full.comm.agree import all_or_none
from minidist.full.ddp.sampler import State
from minidist.full.layers.compiled import name_of
from minidist.full.memory.account import Account
from minidist.full.model import GPT, Where
from minidist.full.pipeline import simulate
from minidist.full.placement import WHOLE, placement_of, ties_alike
from minidist.full.precision.masters import MasterWeights
from minidist.full.precision.mixed import LossScaler, check_finite
from minidist.full.trainer.batches import Batch, ReadAhead
from minidist.full.trainer.checked import CheckedRun, device_of
from minidist.full.trainer.config import ConfigError
from minidist.full.trainer.metrics import Reporter, StepMetrics
from minidist.full.trainer.observed.held_out import loss_on
from minidist.full.trainer.observed.meter import StepMeter
from minidist.full.trainer.optimizer import build_optimizer, check_room, rate_at
from minidist.full.trainer.start import Start, carried_of, loss_of, serial_model

Sent = dict[str, NDArray[np.int64]]
"""By axis: the bytes of messages, and those that an engine had to send, by formula; see
`Traffic`.
"""


@dataclass
class Outcome:
    """The result of a run on this rank, with the whole model."""

    model: GPT
    history: list[StepMetrics]
    sent: Sent  # along each axis of the mesh, and between nodes, by all steps
    scaler: LossScaler | None = None
    held: dict[str, int] = field(default_factory=dict)  # bytes of each category after the last step
    saves: list[tuple[float, float]] = field(default_factory=list)  # seconds; see `Writer.saves`
    ties_alike: bool = True  # whether all stages that share a parameter have the same bits of it


class Regroup(Exception):
    """All ranks leave after a step, so that those who wait outside can come in."""


class Measured(NamedTuple):
    """What is known of the gradients of a step before they are used.

    Attributes
    ----------
    norm : scalar tensor
        Of the whole model's, scaled.
    overflow : bool
        Whether one is infinite, on any rank.
    rate : float
        The learning rate of the step.
    """

    norm: Tensor
    overflow: bool
    rate: float


class Trainer:
    """One run, on one rank of its mesh.

    With a mesh of one rank it is the serial run: the bare model and no strategy.

    Making one only puts together what others have read and checked.
    """

    parallel: Parallel  # from `spread` on
    optimizer: MasterWeights
    profiler: torch.profiler.profile | None = None
    bubble: float | None = None  # of the last step
    warned: Callable[[], bool] | None = None  # whether this rank was asked to save and leave
    awaited: Callable[[], bool] | None = None  # whether ranks wait outside to be let in
    leaves: bool = False  # whether some rank has to leave after the last step, for either reason
    check: Callable[[], None] | None = None  # raises if a rank was lost
    recover: Callable[[], None] | None = None  # fetches what other ranks have trained, once spread
    saves: bool = False  # and whether it was asked to save before
    last: StepMetrics | None = None  # of the last step
    writer: Writer | None = None
    ready: Measured | None = None  # gradients that only wait to be used, and not for other ranks
    reached: State | None = None  # where the batches stand after the one that is trained on

    def __init__(self, run: CheckedRun, start: Start) -> None:
        self.checked = run
        self.config = run.config
        self.mesh = run.mesh
        self.comm = run.mesh.world
        self.recipe = run.fit.recipe
        self.dtype = run.config.dtype
        self.start = start
        self.model = start.model
        self.scaler = start.scaler
        self.device = device_of(self.comm)
        self.first_step = self.done = start.resumed.step if start.resumed else 0
        self.position = start.batches.state_dict()  # after so many steps
        flops = start.model.config.flops_per_token(run.config.data.sequence)
        self.meter = StepMeter(run.config, run.mesh, self.device, flops)
        self.planned_bubble = simulate(run.fit.plan).bubble if run.fit.plan else None

    def run(self, reporter: Reporter | None = None, account: Account | None = None) -> Outcome:
        """Train to the last step, report each to `reporter`, and return the outcome. Collective.

        An `account` watches the last step, and slows it down; `self.profiler`, if set, those that
        its schedule says. Once `self.warned`, if set, says so on any rank, the run saves and ends.

        Raises
        ------
        CheckpointError
            On every rank, if one cannot be written: when the next one is due, or at the end.
        ConfigError
            On every rank, if the folder of the offloaded state has no room.
        FloatingPointError
            On every rank, if gradients overflow, at every loss scale if there is one.
        Regroup
            On every rank, once `self.awaited`, if set, says on any that others wait outside.
        """
        run = self.config.run
        self.spread()
        if self.recover is not None:
            self.recover()
        writer = Writer(Path(run.save), self.comm, run.keep, run.keep_every) if run.save else None
        self.writer = writer
        self.before = self._sent()
        history: list[StepMetrics] = []
        if self.last is not None:  # of an earlier view, in which the rest was not certain any more
            saved = writer is not None and writer.has(self.last.step)
            self._after_step(self.last, reporter, None if saved else writer)
        ahead = ReadAhead(self.start.batches, pin=self.device.type == "cuda")
        with self._overflow_expected(), self.profiler or contextlib.nullcontext(), ahead as batches:
            for step, batch in zip(range(self.first_step, run.steps), batches, strict=False):
                watched = account if step + 1 == run.steps else None
                self.reached = batches.state_dict()
                with self._watching(watched) if watched else contextlib.nullcontext():
                    self.last = self._measured_step(step, batch.to(self.device))
                self.done, self.position = step + 1, self.reached
                if self.profiler is not None:
                    self.profiler.step()
                history.append(self._after_step(self.last, reporter, writer))
                if self.leaves:
                    break
        sent = {axis: now - self.before[axis] for axis, now in self._sent().items()}
        if writer is not None:
            writer.wait()
        if self.leaves and not self.saves:
            raise Regroup
        held = self._watch(Account()).sample()
        saves = writer.saves if writer else []
        model, alike = self._whole_model(), ties_alike(self.parallel.ties)
        return Outcome(model, history, sent, self.scaler, held, saves, alike)

    def _after_step(
        self, metrics: StepMetrics, reporter: Reporter | None, writer: Writer | None
    ) -> StepMetrics:
        """Measure on held-out text, report and save, as far as each is due; return the metrics."""
        run, step = self.config.run, metrics.step
        if self.start.held_out is not None and self._due(step, run.eval_every):
            sent = self._sent()
            scale = self.scaler.scale if self.scaler else 1.0
            batches = self.start.held_out.first(run.eval_batches)
            measured = loss_on(batches, self.parallel, self.device, scale)
            metrics = replace(metrics, eval_loss=measured)
            for axis, now in self._sent().items():  # what is sent for it is not training's
                self.before[axis] = self.before[axis] + now - sent[axis]
        if reporter is not None:
            reporter.step(metrics)
        if writer is not None and (self.saves or self._due(step, run.save_every)):
            self._save(writer, step)
        return metrics

    def finish_step(self) -> None:
        """Take the step that is ready, after the ranks that had to know of it were lost."""
        self.update()
        assert self.reached is not None, "the step had a batch"
        self.done, self.position = self.done + 1, self.reached

    def spread(self) -> Parallel:
        """Apply the strategies, build the optimizer over this rank's part, and load a run to
        resume. Collective.
        """
        all_or_none(self.comm, lambda: check_room(self.model, self.mesh, self.config), ConfigError)
        sum_of, scaler = loss_of(self.model, self.mesh), self.scaler
        # cut across ranks, it would be in pieces
        if (backend := self.recipe.compile) and self.mesh.layout.tp == 1:
            sum_of = torch.compile(sum_of, backend=name_of(backend))

        sites = self.mesh.dcn.size

        def loss(logits: Tensor, part: Batch) -> Tensor:
            mean = sum_of(logits, part.targets) * sites / part.tokens  # a site's share of them
            return scaler.scale_loss(mean) if scaler else mean

        carried = carried_of(self.model, self.mesh, self.recipe)
        generator = torch.Generator().manual_seed(self.config.run.seed)
        self.parallel = parallelize(
            self.model, self.mesh, self.checked.fit, loss, carried, generator=generator
        )
        self.optimizer = all_or_none(
            self.comm, lambda: build_optimizer(self.parallel, self.config), ConfigError
        )
        if self.start.resumed is not None:
            path = self.start.resumed.path
            all_or_none(
                self.comm, lambda: load_pieces(path, self.parallel, self.optimizer), CheckpointError
            )
            self.parallel.stepped()
        return self.parallel

    def _due(self, step: int, every: int) -> bool:
        """Tell whether what is due after the last step and every N steps is to be done after
        this one.
        """
        return step == self.config.run.steps or (every > 0 and step % every == 0)

    def step(self, step: int, batch: Batch, rate: float) -> tuple[float, float]:
        """Take one optimizer step.

        Return the loss per token of the global batch, and the norm of the gradients.
        """
        self.ready = None
        self.parallel.zero_grad()
        parts = batch.microbatches(self.recipe.microbatches)
        weight = self.mesh.dcn.size * (self.scaler.scale if self.scaler else 1.0) / batch.tokens
        seed = self.config.run.seed
        where = [
            Where(seed, step, part.first_row, part.positions, weight, part.documents)
            for part in parts
        ]
        pipeline = self.parallel.pipeline
        started = self.comm.clock()
        loss = self.parallel.step([part.inputs for part in parts], parts, where)
        loss /= self.scaler.scale if self.scaler else 1.0
        if self.mesh.tp.rank > 0:
            loss.zero_()  # it is the same along the tensor axis
        measured = self._measure(rate)
        # What all ranks have to know of a step goes with its loss.
        beside = [] if pipeline is None else [pipeline.busy]
        asked = [ask for ask in (self.warned, self.awaited) if ask is not None]
        beside += [float(ask()) for ask in asked]
        beside += self.meter.own_computing()
        told = torch.cat([loss.view(1), loss.new_tensor(beside)])
        if self.check is not None:
            told = told.cpu()  # waits for a GPU; if a rank is lost, what it has computed is rubbish
            self.check()
        self.ready = measured
        # who has passed this sum knows that all ranks have what they need for the update
        all_reduce(told, self.mesh.site)
        heard = told.tolist()
        del heard[: 1 if pipeline is None else 2]
        due = self._due(step + 1, self.config.run.save_every)
        answers, norms = self.parallel.agreed(heard[: len(asked)], measured.norm, due)
        if self.mesh.dcn.size > 1:  # a site alone would leave the others waiting
            check_finite(norms, self.writer.wait if self.writer else None)
        self.meter.hear(heard[len(asked) :])
        self.leaves = any(answers)
        self.saves = self.warned is not None and bool(answers[0])
        # all ranks come here together; on a GPU, whose kernels run later, nothing is known
        if pipeline is not None:
            length = (self.comm.clock() - started) * self.mesh.site.size
            on_gpu = self.device.type == "cuda"
            self.bubble = None if on_gpu else max(0.0, 1 - float(told[1]) / length)
        return float(told[0]), self.update()

    def _measure(self, rate: float) -> Measured:
        """Return what the update depends on beside the gradients. Collective."""
        # of gradients in 16 bits: the step widens them before it clips
        norm = self.parallel.clip(0)
        return Measured(norm, self.scaler is not None and self.scaler.overflowed(norm), rate)

    def update(self) -> float:
        """Clip and step, unless a gradient overflowed on some rank; return the norm, unscaled.

        With plain data parallelism it needs no other rank.
        """
        assert self.ready is not None, "a step has run backward and measured its gradients"
        measured, overflow, rate = self.ready
        self.ready = None
        scale = self.scaler.scale if self.scaler else 1.0
        with self.comm.span("optimizer"):
            if self.scaler is not None:
                self.scaler.update(overflow)
            elif self.mesh.dcn.size == 1:  # sites have agreed before
                check_finite(measured, self.writer.wait if self.writer else None)
            norm = float(measured) / scale
            limit = self.config.optimizer.clip
            clipping = min(1.0, limit / (norm + 1e-6)) if limit and math.isfinite(norm) else 1.0
            if not overflow:
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
                self.optimizer.step(factor=clipping / scale)
        return norm

    def _measured_step(self, step: int, batch: Batch) -> StepMetrics:
        meter = self.meter
        meter.begin()
        rate = rate_at(self.config, step)
        loss, norm = self.step(step, batch, rate)
        if meter.observed:
            sent = {axis: int(bytes.sum()) for axis, bytes in self._sent().items()}
            meter.sample(sent, lambda: self._watch(Account()).sample())
        measured = meter.end(step + 1, loss, norm, rate, batch.tokens)
        return replace(
            measured,
            load=self.parallel.load,
            bubble=self.bubble,
            planned_bubble=self.planned_bubble,
        )

    def _sent(self) -> Sent:
        each = self.mesh.traffic()
        if apart := self.parallel.replica.between_nodes():
            each["nodes"] = apart[0].traffic
        return {
            axis: np.array([traffic.bytes, traffic.engine_bytes]) for axis, traffic in each.items()
        }

    def _save(self, writer: Writer, step: int) -> None:
        """Begin to write a checkpoint; training continues meanwhile."""
        state = {
            "batches": self.position,
            "config": self.config.sections(),
            "model": asdict(self.model.config),
        }
        state |= {
            "base": self.start.base,
            "origin": self.start.origin,
            "scaler": self.scaler.state_dict() if self.scaler else None,
        }
        writer.save(step, pieces_to_save(self.parallel, self.optimizer), state)

    def _whole_model(self) -> GPT:
        """End training; return the model as one rank would have it. Collective."""
        self.parallel.unwrap()
        if all(placement_of(parameter) is WHOLE for parameter in self.model.parameters()):
            return self.model
        whole = serial_model(self.checked)
        weights = dict(self.parallel.whole_parameters(whole.named_parameters()))
        # a tied head has no weights of its own
        whole.load_state_dict(weights, strict=False, assign=True)
        whole.tie()
        self.parallel.copy_state(whole)
        return whole

    def _watch(self, account: Account) -> Account:
        account.watch(self.parallel.replica.called, self.optimizer, self.comm)
        for companion in self.parallel.companions:
            account.watch(optimizer=companion)
        return account

    def _watching(self, account: Account) -> contextlib.AbstractContextManager[None]:
        if (stream := self.parallel.replica.stream) is not None:
            account.watch(comm=stream.comm)
        return self._watch(account).recording()

    def _overflow_expected(self) -> contextlib.AbstractContextManager[Any]:
        """Keep numpy from warning of an overflow in a reduction if there is a scaler, which handles
        it.
        """
        if self.scaler is None:
            return contextlib.nullcontext()
        if (stream := self.parallel.replica.stream) is not None:
            stream.launch(_ignore_overflow).wait()  # each thread has settings of its own
        return np.errstate(over="ignore", invalid="ignore")


def _ignore_overflow() -> None:
    np.seterr(over="ignore", invalid="ignore")
