"""Text, the global batch of each step, and this rank's part of it.

    step 3, 8 sequences of T + 1 bytes      dp 0, microbatch 0   rows 0 1
                                            dp 0, microbatch 1   rows 2 3
                                            dp 1, microbatch 0   rows 4 5      cp 0 and cp 1 have the first
                                            dp 1, microbatch 1   rows 6 7      and second half of the tokens of each

The batch of a step depends on the seed and the step alone, never on the layout: every layout trains
on the same tokens, and a resumed run goes on with the next. A token is a byte, so a vocabulary of
256 is enough and there is no tokenizer to learn.
"""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def read_text(path: str = "") -> Tensor:
    """Return the bytes of a text file as tokens [n]; by default Python's own documentation."""
    if path:
        text = Path(path).read_bytes()
    else:
        topics = pydoc_data.topics.topics
        text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))


@dataclass(frozen=True)
class Batches:
    """The global batches of a run: `rows` sequences of T = `sequence` tokens, cut from a text.

    `seed` draws where in the text each sequence begins.
    """

    tokens: Tensor  # [n]
    rows: int
    sequence: int
    seed: int = 0

    def __post_init__(self) -> None:
        size, needed = len(self.tokens), self.sequence + 1  # a sequence, and what follows it
        if size < needed:
            found = f"the text has {size} bytes, and a sequence takes {needed}"
            raise ValueError(f"{found}: give a longer text, or a shorter --sequence")

    @property
    def tokens_in_batch(self) -> int:
        """Targets of a global batch, by which the loss is divided."""
        return self.rows * self.sequence

    def batch(self, step: int) -> Tensor:
        """Return the sequences of a step: [rows, T + 1]."""
        windows = self.tokens.unfold(0, self.sequence + 1, 1)  # [n - T, T + 1], a view
        draws = np.random.default_rng((self.seed, step))
        return windows[draws.integers(0, len(windows), self.rows)]


@dataclass(frozen=True)
class Share:
    """This rank's part of each batch.

    Along the data axis it has rows/dp_size rows, along the context axis T/cp_size tokens of each of
    them. It computes its rows in `microbatches` parts.
    """

    dp: int = 0
    dp_size: int = 1
    cp: int = 0
    cp_size: int = 1
    microbatches: int = 1

    def check(self, rows: int, sequence: int) -> None:
        """Raise ValueError if a batch cannot be shared out evenly."""
        if rows % (self.dp_size * self.microbatches):
            parts = f"dp*microbatches = {self.dp_size}*{self.microbatches}"
            raise ValueError(f"--batch {rows} does not divide by {parts}: choose a multiple")
        if sequence % self.cp_size:
            raise ValueError(f"--sequence {sequence} does not divide by --cp {self.cp_size}")

    def first_position(self, sequence: int) -> int:
        """Return the position of this rank's first token."""
        return self.cp * sequence // self.cp_size

    def of(self, batch: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return inputs and targets [b, T/cp] of each microbatch, from a batch [rows, T + 1]."""
        rows = batch.chunk(self.dp_size)[self.dp]
        inputs = rows[:, :-1].chunk(self.cp_size, 1)[self.cp]
        targets = rows[:, 1:].chunk(self.cp_size, 1)[self.cp]
        m = self.microbatches
        return list(zip(inputs.chunk(m), targets.chunk(m), strict=True))
