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
    """The global batches of a run.

    Attributes
    ----------
    tokens : Tensor [n]
        The text.
    rows, sequence : int
        Sequences in a global batch, and tokens in each (T).
    seed : int
        Draws where in the text each sequence begins.
    """

    tokens: Tensor
    rows: int
    sequence: int
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.tokens) <= self.sequence:
            found = (
                f"the text has {len(self.tokens)} bytes, and a sequence takes {self.sequence + 1}"
            )
            raise ValueError(f"{found}: give a longer text, or a shorter --sequence")

    @property
    def tokens_in_batch(self) -> int:
        """Targets of a global batch, by which the loss is divided."""
        return self.rows * self.sequence

    def batch(self, step: int) -> Tensor:
        """Return the sequences of a step: [rows, T + 1]."""
        draws = np.random.default_rng((self.seed, step))
        starts = draws.integers(0, len(self.tokens) - self.sequence, self.rows)
        return torch.stack([self.tokens[start : start + self.sequence + 1] for start in starts])


@dataclass(frozen=True)
class Share:
    """This rank's part of each batch.

    Attributes
    ----------
    dp, dp_size : int
        This rank's place along the data axis: it has rows/dp_size rows.
    cp, cp_size : int
        Along the context axis: it has T/cp_size tokens of each of them.
    microbatches : int
        In how many parts it computes its rows.
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
        inputs, targets = rows[:, :-1], rows[:, 1:]
        mine = [part.chunk(self.cp_size, 1)[self.cp] for part in (inputs, targets)]
        parts = [part.chunk(self.microbatches) for part in mine]
        return list(zip(*parts, strict=True))
