"""Schedules that split the backward, so that weight gradients fill the bubble.

    B = I + W     I, the gradient of the inputs: the stage before waits for it, so it comes at once.
                  W, the gradients of the weights: nobody waits for them, so they come where a rank would idle.

    V placement, 3 ranks      stage 0  1  2 ╮
                              stage 5  4  3 ╯     the first rank holds the last stage too, and has its gradient at once
                              rank  0  1  2

(Qi et al. 2023, "Zero bubble pipeline parallelism". DualPipeV: DeepSeek-AI 2024, "DeepSeek-V3 technical report",
section 3.2.1, folded into a V as in their repository DualPipe.)
"""

from __future__ import annotations

from collections import Counter, deque

from minidist.parallel.pipeline.actions import Action, Kind


class Script:
    """One rank's actions, as they are written down: each kind takes the microbatches of each stage in order."""

    def __init__(self, down: int, up: int) -> None:
        self.stages = {"down": down, "up": up}
        self.row: list[Action] = []
        self.owed: deque[Action] = deque()  # the W of each I, oldest first
        self.taken: Counter[Action] = Counter()  # forwards and backwards of each stage so far

    def repeat(self, times: int, *steps: str) -> None:
        """Write the steps `times` times: `F down` is a forward on the way down, `W` the one that is owed longest."""
        for step in steps * times:
            if step == Kind.WEIGHTS:
                self.row.append(self.owed.popleft())
                continue
            kind, way = step.split()
            first = Action(Kind(kind), self.stages[way])
            action = first._replace(microbatch=self.taken[first.key])
            self.taken[first.key] += 1
            self.row.append(action)
            if action.kind == Kind.INPUTS:
                self.owed.append(action._replace(kind=Kind.WEIGHTS))

    def only(self, microbatches: int) -> list[Action]:
        """Return the row, and all W that are still owed, without the microbatches from this number on.

        That leaves the order of the others as it is, so a plan without a deadlock still has none.
        """
        return [action for action in (*self.row, *self.owed) if action.microbatch < microbatches]


def zb_h1(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """1f1b with W put off by `rank` microbatches: the last ranks have most W left, and most time to fill at the end.

    With p microbatches or more, rank r idles (p-1)(F + I - W), if W is the shortest of the three. It holds at most p-r
    microbatches, as in 1f1b, and of r + 1 more what W needs. (Qi et al. 2023, section 2.1, figure 3.)
    """
    script = Script(rank, rank)
    script.repeat(ranks - rank - 1, "F down")
    script.repeat(rank, "F down", "I down")
    script.repeat(microbatches - rank, "F down", "I down", "W")
    return script.only(microbatches)


def zb_v(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Two stages a rank in a V: if F, I and W take equal times, no rank waits between its first and its last action.

    A rank holds at most 2p microbatches of one stage, which is half of its layers: as much as the first rank of 1f1b.
    The schedule is made for 2p - 1 microbatches or more; for fewer, the others are taken out.
    (Qi et al. 2023, section 6.)
    """
    script = Script(rank, 2 * ranks - 1 - rank)
    script.repeat(2 * (ranks - rank) - 1, "F down")
    script.repeat(rank, "F up", "F down")
    script.repeat(ranks - rank, "F up", "I up", "W")
    script.repeat(max(microbatches, 2 * ranks - 1) - ranks, "F down", "I down", "W", "F up", "I up", "W")
    script.repeat(rank, "I down", "I up")
    script.repeat(ranks - rank, "I down", "W")
    return script.only(microbatches)


def dualpipe_v(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Two stages a rank in a V: the forward of one beside the backward of the other, and W where a rank would idle.

    In the paper such a pair runs at the same time: one computes while the other communicates. Here the forward comes
    directly before the backward. A rank holds at most 2p + 1 microbatches of one stage, which is half of its layers.
    The schedule is made for 2p microbatches or more; for fewer, the others are taken out.
    (DeepSeek-AI 2024, section 3.2.1, figure 5 for DualPipe, of which this is one half, folded.)
    """
    below = ranks - rank - 1  # how many ranks are nearer to the turn of the V
    script = Script(rank, 2 * ranks - 1 - rank)
    script.repeat(2 * below, "F down")
    script.repeat(rank + 1, "F down", "F up")
    script.repeat(below, "I up", "W", "F up")
    script.repeat(max(microbatches - 2 * ranks, 0) + rank + 1, "F down", "B up", "F up", "B down")
    script.repeat(below, "B up", "F up", "B down")
    last = ("up", "down") * (rank + 1)
    script.repeat(1, *(f"B {way}" for way in last[: rank + 1]), *(f"I {way}" for way in last[rank + 1 :]))
    script.repeat(below, "W", "I down")
    return script.only(microbatches)
