# task 5: compares with every look that there was, not with the one before: a rank that moved in between is not stuck.
from solution import *  # noqa: F403
from solution import follow


def watch(look, pause, limit):
    seen = []
    while True:
        now, states = look()
        for rank in (rank for rank, state in enumerate(states) if state[0] == "waits"):
            kind, ranks = follow(rank, states)
            waits = [r for r in ranks if states[r][0] == "waits"]
            stood_still = any(all(states[r] == before[r] for r in waits) for before in seen)
            if (now - states[rank][2] > limit) if kind == "slow" else stood_still:
                return kind, ranks
        if all(state[0] == "finished" for state in states):
            return None
        seen.append(states)
        pause()
