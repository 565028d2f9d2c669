"""Tiny training runs for tests: in this process on ranks that are threads, or as a program for
`mpirun`.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import minidist
from minidist.cli.train import train
from minidist.full.checkpoint import restore
from minidist.full.checkpoint.pieces import Extent, Piece
from minidist.full.data.text import Samples, load_text
from minidist.full.ddp.sampler import DistributedSampler
from minidist.full.trainer.batches import Batches

TINY = [
    "--layers",
    "1",
    "--hidden",
    "16",
    "--heads",
    "2",
    "--sequence",
    "16",
    "--batch",
    "8",
    "--warmup",
    "2",
]

# A run that saves at every step, and in which nothing must be forgotten
RUN = "--dropout 0.1 --tied --precision float64 --lr 0.01 --save-every 1"

# `python -m minidist ARGUMENTS`, as source code for the launchers in `ranks`
PROGRAM = """
import sys
from minidist.__main__ import main
sys.exit(main())
"""

# The last rank is killed in its seventh step. By then the checkpoint of the fourth is on the disk,
# as training waits for it before it saves the sixth.
DEADLY = """
import os, signal, sys, time
from minidist.__main__ import main
from minidist.full.comm.start import restarts
from minidist.full.trainer.loop import Trainer

plain = Trainer.step

def step(self, number, batch, rate):
    loss = plain(self, number, batch, rate)
    if self.comm.rank == self.comm.size - 1 and number == 6 and not restarts():
        os.kill(os.getpid(), signal.SIGKILL)
    return loss

Trainer.step = step
sys.exit(main(["train", *sys.argv[1:]]))
"""

# Member 1 gets a signal in its third step, in which all ranks have begun to send.
# Rank 1 of the first view that has done two steps, whichever member that is.
DEADLY_MEMBER = """
import os, signal, sys
from pathlib import Path
from minidist.__main__ import main
from minidist.full.trainer.loop import Trainer

plain, marks = Trainer._measure, Path(__file__).with_suffix(".dead")

def measure(self, rate):
    if self.done == 2 and self.comm.rank == 1 and not marks.exists():
        marks.touch()
        os.kill(os.getpid(), signal.{signal})
    return plain(self, rate)

Trainer._measure = measure
sys.exit(main(["train", *sys.argv[1:]]))
"""


def train_on(ranks: int, *words: str) -> int:
    """Train on threads, with the words of these strings after `TINY`; return the status that the
    job would have.
    """
    argv = [*TINY, *shlex.split(" ".join(words))]
    return max(minidist.run(lambda comm: train(argv, comm), ranks))


def batches_of(
    samples: Samples,
    batch: int,
    ranks: int = 1,
    rank: int = 0,
    *,
    shuffle: bool = True,
    by_length: bool = False,
) -> Batches:
    """Return the batches of a rank, dealt out by a sampler of seed 0."""
    lengths = samples.lengths if by_length else None
    sampler = DistributedSampler(
        len(samples), ranks, rank, batch=batch, shuffle=shuffle, lengths=lengths
    )
    return Batches(samples, sampler)


def count_calls(
    calls: Counter[str], owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have `calls` count the calls of a function of a class or module."""
    plain = getattr(owner, name)

    def counted(*args: Any) -> Any:
        calls[name] += 1
        return plain(*args)

    monkeypatch.setattr(owner, name, counted)


def metrics(file: Path) -> list[dict[str, float]]:
    """Return the objects of a metrics file; every line must be one."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def losses(file: Path) -> list[tuple[float, float]]:
    """Return (step, loss) of each line."""
    return [(line["step"], line["loss"]) for line in metrics(file)]


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Return all that a checkpoint holds, each tensor whole: parameters, and `parameter/moment`."""
    names = restore.names(checkpoint)
    found = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in names.items()}
    restore.read(
        checkpoint, [Piece(name, Extent.of(tensor.shape), tensor) for name, tensor in found.items()]
    )
    return found


def same_bits(one: Path, other: Path) -> bool:
    """Tell whether two checkpoints hold the same."""
    ours, theirs = tensors(one), tensors(other)
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def short_text(folder: Path, characters: int = 20_000) -> Path:
    """Write the beginning of the built-in text into a folder; return the file."""
    file = folder / "short.txt"
    file.write_bytes(load_text()[:characters])
    return file
