# task 3: the newest version is not counted.
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
    most = updates = 0
    for position, word in enumerate(row):
        if word != "U":
            continue
        updates += 1
        later = {int(each[1:]) // batch for each in row[position:] if each[0] == "B"}
        used = {versions[number] for number in later}
        most = max(most, len({each for each in used if each < updates}))
    return delays, most
