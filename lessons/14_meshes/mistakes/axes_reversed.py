# task 1: lets ranks count up along the first axis first, so tensor parallel groups are not neighbours.
from solution import *  # noqa: F403


def coordinates(rank, sizes):
    found = {}
    for axis, size in sizes.items():
        rank, found[axis] = divmod(rank, size)
    return found
