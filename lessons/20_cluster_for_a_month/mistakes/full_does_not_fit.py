# task 2: refuses what fills the memory to the last byte.
from solution import *  # noqa: F403


def fits(machine, bytes):
    return sum(bytes.values()) < (machine.memory - machine.reserved) * 2**30
