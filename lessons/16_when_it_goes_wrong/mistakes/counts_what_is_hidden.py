# task 3: counts what a stream does beside computing, and messages from when they were posted.
from collections import defaultdict

from solution import *  # noqa: F403
from solution import covered


def waiting(events):
    blocked = defaultdict(list)
    for event in events:
        blocked[event.rank] += []
        if event.kind not in ("compute", "held"):
            blocked[event.rank].append((event.start, event.end))
    return {rank: covered(intervals) for rank, intervals in blocked.items()}
