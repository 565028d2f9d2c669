# task 3: as many copies as the largest delay, also of versions that nobody uses.
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
    return delays, max(delays)
