# task 5: reports a cycle or a chain at first sight, while a message is still on its way.
from solution import *  # noqa: F403
from solution import follow


def watch(look, pause, limit):
    while True:
        now, states = look()
        for rank in (rank for rank, state in enumerate(states) if state[0] == "waits"):
            finding = follow(rank, states)
            if finding[0] != "slow" or now - states[rank][2] > limit:
                return finding
        if all(state[0] == "finished" for state in states):
            return None
        pause()
