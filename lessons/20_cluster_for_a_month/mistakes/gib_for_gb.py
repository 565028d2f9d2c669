# task 2: takes GiB for GB: 80 GiB are 85.9e9 bytes.
from solution import *  # noqa: F403


def fits(machine, bytes):
    return sum(bytes.values()) <= (machine.memory - machine.reserved) * 1e9
