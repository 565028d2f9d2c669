"""Which layouts fit: what each holds, and for those that fit how long they take, in closed form."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from minidist.plan.memory import GB, bytes_held
from minidist.plan.run import Setup
from minidist.plan.search.choices import options
from minidist.plan.search.found import Found
from minidist.plan.search.layouts import candidates, orders
from minidist.plan.step import step

# of a GPU's memory: what an allocator cannot use, and a batch that is longer than others
RESERVE = 0.05


def fitting(
    start: Setup, fixed: Mapping[str, Any], reserve: float, refused: Counter[str]
) -> tuple[list[Found], float]:
    """Return the layouts that fit, timed in closed form, and the bytes of a GPU in the smallest of
    all.
    """
    memory = min(site.device.memory for site in start.machine.sites)
    room = memory * (1 - reserve)
    free = f", of which {reserve:.0%} stay free" if reserve else ""
    too_much = f"hold more than the {memory / GB:.0f} GB of a GPU{free}"
    smallest = float("inf")
    found: list[Found] = []
    for offload in options(fixed, "offload"):  # to the host's memory only if nothing fits without
        if found:
            break
        for ladder in candidates(start, {**fixed, "offload": offload}, refused):
            has_two = False
            for run in ladder:
                if has_two and run.zero == 2:
                    continue  # the one before it was faster
                bytes = bytes_held(run)
                total = sum(bytes.values())
                smallest = min(smallest, total)
                if total > room:
                    refused[too_much] += 1
                    continue
                found += [Found(each, step(each), bytes) for each in orders(run, fixed)]
                has_two = run.zero == 2
                if not has_two:
                    break  # what saves more memory is slower
    return found, smallest
