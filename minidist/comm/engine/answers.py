"""What a roll call of processes sends: any small answer, by one all-gather of bytes.

rank 0   length │ its rank and answer, pickled │ zeros     ─┐ all-gather of 256 bytes a rank; if one answer is
rank 1   length │ its rank and answer, pickled │ zeros     ─┘ longer than that, all once more, at its length
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

SMALL = 256


def gather_answers(ranks: int, rank: int, answer: Any, all_gather: Callable[[Any, Any], None]) -> list[Any]:
    """Return every rank's answer, by rank. Collective.

    Parameters
    ----------
    all_gather
        `all_gather(mine, everyones)` leaves everybody's bytes `mine` in the rows of `everyones`, in whatever order.
    """
    told = np.frombuffer(pickle.dumps((rank, answer)), np.uint8)
    room = SMALL
    while True:
        mine, everyones = np.zeros(8 + room, np.uint8), np.empty((ranks, 8 + room), np.uint8)
        mine[:8] = np.array([len(told)]).view(np.uint8)
        mine[8 : 8 + len(told)] = told[:room]
        all_gather(mine, everyones)
        longest = max(int(row[:8].view(np.int64)[0]) for row in everyones)
        if longest <= room:
            answers = [pickle.loads(row[8:].tobytes()) for row in everyones]  # which ignores the zeros behind
            return [answer for _, answer in sorted(answers, key=lambda pair: int(pair[0]))]
        room = longest
