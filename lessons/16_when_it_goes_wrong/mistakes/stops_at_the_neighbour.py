# task 5: looks one hop far: the rank that it names only waits for the one that is to blame.
from solution import *  # noqa: F403


def watch(look, pause, limit):
    before = None
    while True:
        now, states = look()
        for rank, (doing, peer, since) in enumerate(states):
            if doing == "waits" and states[peer][0] == "finished" and before == states:
                return "gone", [rank, peer]
            if doing == "waits" and now - since > limit:
                return "slow", [rank, peer]
        if all(state[0] == "finished" for state in states):
            return None
        before = states
        pause()
