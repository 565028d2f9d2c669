"""`python -m minidist stages`: one training run under every strategy that shards; what each holds, sends and costs.

              parameters  gradients  optimizer  activations  communication │ sent a step │ tokens/s │ difference
DDP
ZeRO-1
...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from minidist.cli.together import on_all_ranks, stopping_together, together
from minidist.cli.train import read_corpus
from minidist.cli.train_checks import fitting_layout
from minidist.comm import Communicator
from minidist.memory.account import CATEGORIES, Account, total
from minidist.mesh import Mesh
from minidist.trace.table import format_bytes
from minidist.trainer.config import Config
from minidist.trainer.flags import parse
from minidist.trainer.loop import Outcome, Trainer
from minidist.trainer.text import Samples
from minidist.trainer.verify import largest_difference, serial_run


@dataclass(frozen=True)
class Row:
    """What one strategy did. Bytes are of the rank with the most: of each category, and of all at one moment."""

    name: str
    held: dict[str, int]
    most: int
    sent: int
    tokens_per_second: float
    outcome: Outcome


def main(argv: Sequence[str]) -> int:
    """Run all stages; return the exit status: 0, 1 if one differs from the serial run, 2 for unusable input.

    Parameters
    ----------
    argv : sequence of str
        Options of `train`. What they say of `--zero`, `--hsdp` and `--recompute` is overruled.
    """
    return on_all_ranks("stages", lambda comm: stopping_together("stages", comm, lambda: stages(argv, comm)))


def stages(argv: Sequence[str], comm: Communicator) -> int:
    """Run every stage on the ranks of `comm`; rank 0 prints the table."""
    config = together(comm, lambda: parse(argv))
    config = replace(config, run=replace(config.run, precision="float64", save="", metrics="", trace="", sample=0))
    layout = together(comm, lambda: fitting_layout(config, comm.size))
    tokenizer, samples, _ = together(comm, lambda: read_corpus(config))
    mesh = Mesh(comm, layout)
    rows = [run_stage(name, stage, samples, tokenizer.vocabulary, mesh) for name, stage in variants(config, comm.size)]
    if comm.rank > 0:
        return 0
    serial = serial_run(config, samples, tokenizer.vocabulary)
    differences = [largest_difference(row.outcome.model, serial.model) for row in rows]
    print(table(rows, differences), flush=True)
    return 0 if max(differences) <= 1e-9 else 1


def variants(config: Config, ranks: int) -> list[tuple[str, Config]]:
    """Return the stages by name: the same run, otherwise."""

    def stage(zero: int, hsdp: int = 0, recompute: str = "none") -> Config:
        parallel = replace(config.parallel, strategy="ddp", zero=zero, hsdp=hsdp)
        return replace(config, parallel=parallel, memory=replace(config.memory, recompute=recompute))

    found = [("DDP", stage(0)), ("ZeRO-1", stage(1)), ("ZeRO-2", stage(2)), ("ZeRO-3", stage(3))]
    if ranks > 2 and ranks % 2 == 0:
        found.append(("ZeRO-3 in groups of 2", stage(3, hsdp=2)))
    return [*found, ("ZeRO-3, recompute full", stage(3, recompute="full"))]


def run_stage(name: str, config: Config, samples: Samples, vocabulary: int, mesh: Mesh) -> Row:
    """Train, and account for the last step."""
    mesh = Mesh(mesh.world.split(0), mesh.layout)  # whose registered memory is this run's alone
    comm, account = mesh.world, Account(mesh.world)
    trainer = together(comm, lambda: Trainer(config, samples, vocabulary, mesh))
    outcome = together(comm, lambda: trainer.run(account=account))
    most = max(map(total, comm.roll_call(account.peak)))
    peaks = comm.roll_call(account.peaks)
    steps = outcome.history[:-1] or outcome.history  # the last was watched, and slow
    speed = median(metrics.tokens_per_second for metrics in steps)
    held = {category: max(peak[category] for peak in peaks) for category in CATEGORIES}
    return Row(name, held, most, outcome.gradient_bytes_sent // len(outcome.history), speed, outcome)


def table(rows: list[Row], differences: list[float]) -> str:
    """Return the rows as text."""
    heads = ["", *CATEGORIES, "at once", "sent a step", "tokens/s", "difference"]
    lines = [
        [
            row.name,
            *(format_bytes(row.held[category]) for category in CATEGORIES),
            format_bytes(row.most),
            format_bytes(row.sent),
            f"{row.tokens_per_second:,.0f}",
            f"{difference:.0e}",
        ]
        for row, difference in zip(rows, differences, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    text = [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in [heads, *lines]
    ]
    return "\n".join(
        [
            *text,
            "Bytes: the most of each category, and of all at once, on any rank. Difference: to the serial run.",
        ]
    )
