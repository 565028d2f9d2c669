# task 5: says nothing before the limit, although a deadlock is certain at once.
import solution
from solution import *  # noqa: F403


def watch(look, pause, limit):
    def patient():
        now, states = look()
        return now, [
            ("computes", -1, 0.0) if s[0] == "waits" and now - s[2] <= limit else s for s in states
        ]

    return solution.watch(patient, pause, limit)
