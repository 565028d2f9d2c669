# task 3: in zigzag order all keys of an earlier rank are met, and none of a later one, as in contiguous order.
from solution import *  # noqa: F403
from solution import meeting as right


def meeting(order, mine, source, time):
    if order == "zigzag":
        order = "contiguous"
    return right(order, mine, source, time)
