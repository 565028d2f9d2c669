# task 3: takes a wait from 0.0 on for one of which nobody knows when it began.
from dataclasses import replace

import solution
from solution import *  # noqa: F403


def waiting(events):
    return solution.waiting(
        [replace(event, waited_from=event.waited_from or None) for event in events]
    )
