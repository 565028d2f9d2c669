# task 3: in zigzag order only half of a later rank's keys is met, but both its chunks lie between this rank's two.
from solution import *  # noqa: F403
from solution import Meeting
from solution import meeting as right


def meeting(order, mine, source, time):
    if order == "zigzag" and source > mine:
        return Meeting(slice(time // 2, None), slice(time // 2))
    return right(order, mine, source, time)
