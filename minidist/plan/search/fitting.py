"""Which layouts fit: what each holds, and for those that fit how long they take, in closed form."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minidist.plan.memory import GB, bytes_held
from minidist.plan.run import Setup
from minidist.plan.search.choices import options
from minidist.plan.search.found import Found
from minidist.plan.search.ladders import Ladder
from minidist.plan.search.layouts import candidates, orders
from minidist.plan.step import step

# of a GPU's memory: what an allocator cannot use, and a batch that is longer than others
RESERVE = 0.05
NEARLY = 1.5  # what needs at most so many times the memory is worth a look


@dataclass
class Tried:
    """What a search has tried so far: the layouts that fit, and how many do not for which reason.

    `smallest` is what the smallest of all holds. `close` are those that would fit if a GPU had a
    bit more memory, although they recompute nothing.
    """

    found: list[Found] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    smallest: dict[str, float] = field(default_factory=dict)
    close: list[tuple[Setup, dict[str, float]]] = field(default_factory=list)

    def climb(self, ladder: Ladder, room: float, too_much: str, fixed: Mapping[str, Any]) -> None:
        """Try the rungs of a ladder until one fits."""
        if ladder.least > NEARLY * room and ladder.least >= self.least:
            self.refused[too_much] += len(ladder)
            return
        has_two = False
        for rung, run in enumerate(ladder):
            if has_two and run.zero == 2:
                continue  # the one before it was faster
            if rung > 0 and ladder.least > room and ladder.least >= self.least:
                self.refused[too_much] += len(ladder) - rung
                break
            # What is larger than that is of no interest, however much larger it is.
            limit = NEARLY * room if rung == 0 else room
            limit = max(limit, self.least)
            bytes = bytes_held(run, limit)
            total = sum(bytes.values())
            if total < self.least:
                self.smallest = bytes
            if total > room:
                self.refused[too_much] += 1
                if rung == 0 and total <= NEARLY * room:
                    self.close.append((orders(run, fixed)[-1], bytes))
                continue
            self.found += [Found(each, step(each), bytes) for each in orders(run, fixed)]
            has_two = run.zero == 2
            if not has_two:
                break  # what saves more memory is slower

    @property
    def least(self) -> float:
        """The bytes that the smallest of all holds so far."""
        return sum(self.smallest.values()) if self.smallest else math.inf


def by_seconds(found: Found) -> float:
    """Return the seconds of a step, to sort by."""
    return found.seconds


def fitting(start: Setup, fixed: Mapping[str, Any], reserve: float) -> Tried:
    """Return the layouts that fit, timed in closed form, and what is known of the others."""
    memory = min(site.device.memory for site in start.machine.sites)
    room = memory * (1 - reserve)
    free = f", of which {reserve:.0%} stay free" if reserve else ""
    too_much = f"hold more than the {memory / GB:.0f} GB of a GPU{free}"
    tried = Tried()
    for offload in options(fixed, "offload"):
        # What is sent to the host's memory need not be computed again, which may take longer.
        if tried.found and min(tried.found, key=by_seconds).run.recompute == "none":
            break
        for ladder in candidates(start, {**fixed, "offload": offload}, tried.refused):
            tried.climb(ladder, room, too_much, fixed)
    return tried
