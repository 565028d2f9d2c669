"""`python -m minidist losses`: the same text, trained on in ways that change the numbers. What do
they make of the loss?

                   loss on held-out text   spread over 3 seeds   a rank sends
    DDP                                                                       the serial run's numbers
    PowerSGD, top-k                                                           compressed gradients
    DiLoCo                                                                    sites that meet every H steps
    stale by s                                                                gradients of older weights

All see the same tokens in the same order, with the same learning rate, which is DDP's. The model
that is measured at the end is the mean of all sites'. Gradients that are stale by s are those of a
parameter server (`further/stale/server.py`), computed on one rank.
"""

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minidist.cli.together import on_all_ranks, stopping_together, together
from minidist.cli.variants.compare import writable
from minidist.draw.table import aligned, format_bytes
from minidist.full.comm import Communicator, run
from minidist.full.data.text import Corpus, read_corpus
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import GPT
from minidist.full.trainer.batches import Batch
from minidist.full.trainer.checked import CheckedRun, check_run, layout_of
from minidist.full.trainer.config import Config, ConfigError
from minidist.full.trainer.loop import Measured, Trainer
from minidist.full.trainer.observed.held_out import loss_on
from minidist.full.trainer.options import MemoryOptions
from minidist.full.trainer.start import start_of
from minidist.further import SpreadOptions, parse

SEEDS = 3
STALE = {"stale by 1": 1, "stale by 4": 4}
NOTE = (
    "Held-out loss of the last model, by mean and by spread (largest less smallest). It is one small "
    "model,\nwith the learning rate of DDP and few steps: it does not show what tuning would gain, nor "
    "a long run, nor\nmany ranks. Differences within the spread are none."
)


class Row(NamedTuple):
    """What became of one way: the held-out loss for each seed, and the bytes that rank 0 sent."""

    name: str
    losses: list[float]
    sent: float


class StaleTrainer(Trainer):
    """A run on one rank, each gradient of which is that of weights some updates old."""

    stale = 0

    def step(self, step: int, batch: Batch, rate: float) -> tuple[float, float]:
        """Take one optimizer step, with the gradient of older weights."""
        if step == 0:
            self.versions: deque[list[Tensor]] = deque(maxlen=self.stale + 1)
        weights = self.parallel.replica.trained
        self.versions.append([each.detach().clone() for each in weights])
        self._become(self.versions[0])
        return super().step(step, batch, rate)

    def _measure(self, rate: float) -> Measured:
        self._become(self.versions[-1])  # which the update is made to
        return super()._measure(rate)

    @torch.no_grad()
    def _become(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self.parallel.replica.trained, values, strict=True):
            parameter.copy_(value)


def main(argv: Sequence[str]) -> int:
    """Train in all ways, from several seeds; return the exit status, 0, or 2 for unusable input.

    Parameters
    ----------
    argv : sequence of str
        Options of `train`. What they say of the layout is overruled.
    """
    return on_all_ranks(
        "losses", lambda comm: stopping_together("losses", comm, lambda: compare(argv, comm))
    )


def compare(argv: Sequence[str], comm: Communicator) -> int:
    """Train in every way on the ranks of `comm`; rank 0 prints the table."""
    asked = together(comm, lambda: parse(argv, "python -m minidist losses"))
    metrics = together(comm, lambda: writable(asked.run.metrics) if comm.rank == 0 else None)
    config = replace(asked.without_files(), memory=MemoryOptions())
    ways = together(comm, lambda: ways_of(config, comm.size))
    corpus = together(comm, lambda: read_corpus(config.data))
    rows = []
    for name, way in ways.items():
        found = []
        for seed in range(SEEDS):
            found.append(one_run(comm, with_seed(way, seed), corpus))
        rows.append(told(comm, name, found))
    for name, stale in STALE.items():
        found = []
        for seed in range(SEEDS):
            found.append(stale_run(comm, with_seed(config, seed), corpus, stale))
        rows.append(told(comm, name, found))
    if comm.rank == 0:
        print(f"\n{table(rows)}", flush=True)
        if metrics is not None:
            with metrics:
                metrics.writelines(f"{json.dumps(row._asdict())}\n" for row in rows)
    return 0


def told(comm: Communicator, name: str, found: Sequence[tuple[float, float]]) -> Row:
    """Return the row of a way of which all seeds are done; say so on rank 0."""
    losses = [loss for loss, _ in found]
    if comm.rank == 0:
        words = ", ".join(f"{loss:.4f}" for loss in losses)
        print(f"{name:<16} {words}", flush=True)
    _, sent = found[0]
    return Row(name, losses, sent)


def ways_of(config: Config, ranks: int) -> dict[str, Config]:
    """Return the runs that ranks train together, by name."""
    if ranks < 2:
        raise ConfigError("one rank has nobody to send to: use mpirun -n 2, or more")
    plain = SpreadOptions(dp=ranks)
    asked = {
        "DDP": plain,
        "PowerSGD, rank 4": replace(plain, compress="powersgd:4"),
        "top-k, 1 %": replace(plain, compress="topk:0.01"),
    }
    for every in (10, 50):
        asked[f"DiLoCo, H = {every}"] = SpreadOptions(
            dp=1,
            dcn=ranks,
            local_steps=every,
        )
    return {name: replace(config, parallel=parallel) for name, parallel in asked.items()}


def with_seed(config: Config, more: int) -> Config:
    """Return the same run from another seed: other weights, and another order of the text."""
    return replace(config, run=replace(config.run, seed=config.run.seed + more))


def one_run(comm: Communicator, config: Config, corpus: Corpus) -> tuple[float, float]:
    """Train; return the held-out loss of the last model, and the bytes that rank 0 has sent."""
    layout = together(comm, lambda: layout_of(config, comm.size))
    mesh = Mesh(comm.split(0), layout)
    checked = together(comm, lambda: check_run(config, mesh, corpus.tokenizer.vocabulary))
    trainer = together(comm, lambda: Trainer(checked, start_of(checked, corpus.samples)))
    outcome = together(comm, trainer.run)
    sent = 0.0
    for both in outcome.sent.values():
        sent += float(both.sum())
    measured = 0.0
    if comm.rank == 0:
        measured = held_out_loss(outcome.model, config, corpus)
    mine = measured, sent
    answers: list[tuple[float, float]] = comm.all_gather_object(mine)
    return answers[0]


def stale_run(
    comm: Communicator, config: Config, corpus: Corpus, stale: int
) -> tuple[float, float]:
    """Train with stale gradients, on rank 0; return what `one_run` does, the bytes by formula."""

    def program(alone: Communicator) -> tuple[float, float]:
        checked = serial(config, alone, corpus, measured=False)
        trainer = StaleTrainer(checked, start_of(checked, corpus.samples))
        trainer.stale = stale
        model = trainer.run().model
        bytes = sum(parameter.nbytes for parameter in model.parameters())
        return held_out_loss(model, config, corpus), float(bytes * config.run.steps)

    mine = together(comm, lambda: run(program, 1)[0] if comm.rank == 0 else None)
    answers: list[Any] = comm.all_gather_object(mine)
    return answers[0]  # type: ignore[no-any-return]


def serial(config: Config, comm: Communicator, corpus: Corpus, measured: bool) -> CheckedRun:
    """Return the run on one rank, with or without held-out text."""
    on_text = replace(config.run, eval_every=int(measured))
    alone = replace(config, parallel=SpreadOptions(dp=1), run=on_text)
    return check_run(alone, Mesh(comm, Layout()), corpus.tokenizer.vocabulary)


def held_out_loss(model: GPT, config: Config, corpus: Corpus) -> float:
    """Return the loss per token of a model on all held-out text."""

    def program(alone: Communicator) -> float:
        checked = serial(config, alone, corpus, measured=True)
        start = start_of(checked, corpus.samples, corpus.held_out)
        start.model.load_state_dict(model.state_dict())
        assert start.held_out is not None, "it is asked for"
        batches = start.held_out.first(0)
        return loss_on(batches, Trainer(checked, start).spread(), torch.device("cpu"))

    return run(program, 1)[0]


def table(rows: Sequence[Row]) -> str:
    """Return the rows as text."""
    usual = fmean(rows[0].losses)
    lines = []
    for row in rows:
        mean = fmean(row.losses)
        spread = max(row.losses) - min(row.losses)
        beyond = mean - usual
        sent = format_bytes(int(row.sent))
        figures = f"{mean:.4f}", f"{spread:.4f}", f"{beyond:+.4f}"
        lines.append((row.name, *figures, sent))
    heads = ("", "held-out loss", "spread", "beside DDP", "a rank sends")
    return f"{aligned(heads, lines)}\n{NOTE}"
