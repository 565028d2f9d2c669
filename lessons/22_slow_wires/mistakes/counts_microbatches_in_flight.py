# task 3: a copy for each microbatch in flight.
from solution import *  # noqa: F403


def versions_of(row, batch):
    updates, uses = 0, {}
    for word in row:
        if word == "U":
            updates += 1
        elif word[0] == "F":
            uses.setdefault(int(word[1:]) // batch, updates)
    return [uses[number] for number in sorted(uses)]


def old_weights(row, batch):
    versions = versions_of(row, batch)
    delays = [t - version + 1 for t, version in enumerate(versions)]
    now = most = 0
    for word in row:
        now += (word[0] == "F") - (word[0] == "B")
        most = max(most, now)
    return delays, most
