"""Train several variants of one run, and compare what each holds, sends and costs, and whether the
numbers agree.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple, TextIO

import numpy as np

from minidist.cli.together import on_all_ranks, stopping_together, together
from minidist.draw.table import aligned, format_bytes, format_sent
from minidist.full.comm import Communicator
from minidist.full.data.files import retold
from minidist.full.data.packed import Packed
from minidist.full.data.text import Samples, read_corpus
from minidist.full.memory.account import CATEGORIES, Account, total
from minidist.full.mesh import Mesh
from minidist.full.trainer.checked import CheckedRun, check_run, layout_of
from minidist.full.trainer.config import ConfigError
from minidist.full.trainer.loop import Outcome, Sent, Trainer
from minidist.full.trainer.start import start_of
from minidist.full.trainer.verify import largest_difference, serial_run
from minidist.further import Config, parse
from minidist.further.muon.muon_with_adamw import MuonWithAdamW

NOTE = (
    "Bytes: the most of each category, of all at once, and sent a step, on any rank. Difference: "
    "to the serial run."
)
NOTE_OF_MUON = (
    "Muon: what a step sends over all ranks to make updates orthogonal, as counted, and by formula."
)
Variants = Callable[[Config, int], dict[str, Config]]
"""Returns the ways to do a run on so many ranks: the options of each, by its name."""


class Row(NamedTuple):
    """What one variant did.

    Bytes are of the rank with the most: held of each category and at once, sent a step. Those of
    Muon are of all ranks.
    """

    name: str
    held: dict[str, int]
    sent: Sent
    tokens_per_second: float
    outcome: Outcome
    muon: tuple[int, int] | None  # sent a step for its updates, counted and by formula


def main(command: str, argv: Sequence[str], variants: Variants) -> int:
    """Run all variants.

    Return the exit status: 0, 1 if one differs from the serial run, 2 for unusable input.
    """
    return on_all_ranks(
        command,
        lambda comm: stopping_together(
            command, comm, lambda: compare(argv, comm, variants, command)
        ),
    )


def compare(argv: Sequence[str], comm: Communicator, variants: Variants, command: str) -> int:
    """Run every variant on the ranks of `comm`; rank 0 prints the table."""
    asked = together(comm, lambda: parse(argv, f"python -m minidist {command}"))
    metrics = together(comm, lambda: writable(asked.run.metrics) if comm.rank == 0 else None)
    config = asked.without_files()
    config = replace(config, run=replace(config.run, precision="float64", sample=0))
    chosen = together(comm, lambda: variants(config, comm.size))
    tokenizer, samples, *_ = together(comm, lambda: read_corpus(config.data))
    layouts = together(comm, lambda: [layout_of(asked, comm.size) for asked in chosen.values()])
    meshes = [Mesh(comm.split(0), layout) for layout in layouts]  # own memory each
    with_mesh = list(zip(chosen.values(), meshes, strict=True))
    runs = together(
        comm, lambda: [check_run(config, mesh, tokenizer.vocabulary) for config, mesh in with_mesh]
    )
    rows = [run_variant(name, run, samples) for name, run in zip(chosen, runs, strict=True)]
    if comm.rank > 0:
        return 0
    serial = serial_run(config, samples, tokenizer.vocabulary)
    differences = [largest_difference(row.outcome.model, serial.model) for row in rows]
    print(table(rows, differences), flush=True)
    if metrics is not None:
        with metrics:
            metrics.writelines(
                f"{as_json(row, difference)}\n"
                for row, difference in zip(rows, differences, strict=True)
            )
    return 0 if max(differences) <= 1e-9 else 1


def writable(path: str) -> TextIO | None:
    """Open the file for one JSON object a variant, before the work begins.

    None if nobody asked for one.
    """
    if not path:
        return None
    with retold(
        ConfigError,
        OSError,
        before=f"--metrics {path} cannot be written (",
        after="): give another path",
    ):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return open(path, "w", encoding="utf-8")


def as_json(row: Row, difference: float) -> str:
    """Return what the table says of a variant, for programs."""
    sent = {axis: int(both.sum()) for axis, both in row.sent.items()}
    said = {
        "name": row.name,
        "held": row.held,
        "sent": sent,
        "tokens_per_second": row.tokens_per_second,
    }
    if row.muon is not None:
        said["muon"] = {"counted": row.muon[0], "formula": row.muon[1]}
    return json.dumps(said | {"difference": difference if math.isfinite(difference) else None})


def run_variant(name: str, run: CheckedRun, samples: Samples | Packed) -> Row:
    """Train, and account for the memory of the last step."""
    comm = run.mesh.world
    account = Account(comm)
    trainer = together(comm, lambda: Trainer(run, start_of(run, samples)))
    outcome = together(comm, lambda: trainer.run(account=account))
    peaks, sent = comm.all_gather_object(account.peaks), comm.all_gather_object(outcome.sent)
    steps = outcome.history[:-1] or outcome.history  # the last was watched, and slow
    speed = median(metrics.tokens_per_second for metrics in steps)
    held = {category: max(peak[category] for peak in peaks) for category in CATEGORIES}
    held["at once"] = max(map(total, comm.all_gather_object(account.peak)))
    along = {
        axis: np.max([each[axis] for each in sent], 0) // len(outcome.history)
        for axis in outcome.sent
    }
    return Row(name, held, along, speed, outcome, muon_of(trainer, len(outcome.history)))


def muon_of(trainer: Trainer, steps: int) -> tuple[int, int] | None:
    """Return the bytes that all ranks have sent a step for the updates of Muon, counted and by
    formula; None if AdamW updates all. Collective.
    """
    optimizer = trainer.optimizer
    if not isinstance(optimizer, MuonWithAdamW):
        return None
    everyones = trainer.comm.all_gather_object((optimizer.matrices.sent, optimizer.volume()))
    counted = sum(sent for sent, _ in everyones)
    return counted // steps, round(sum(formula for _, formula in everyones))


def table(rows: list[Row], differences: list[float]) -> str:
    """Return the rows as text."""
    axes = [axis for axis in rows[0].sent if any(row.sent[axis].any() for row in rows)]
    heads = ["", *rows[0].held, *(f"sent along {axis}" for axis in axes), "tokens/s", "difference"]
    notes = [NOTE]
    if rows[0].muon is not None:
        heads[-2:-2] = ["Muon sends", "by formula"]
        notes.append(NOTE_OF_MUON)
    lines = []
    for row, difference in zip(rows, differences, strict=True):
        bytes = [
            *map(format_bytes, row.held.values()),
            *(format_sent(row.sent[axis]) for axis in axes),
            *map(format_bytes, row.muon or ()),
        ]
        lines.append([row.name, *bytes, f"{row.tokens_per_second:,.0f}", f"{difference:.0e}"])
    return "\n".join([aligned(heads, lines), *notes])
