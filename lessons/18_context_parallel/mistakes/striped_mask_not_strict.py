# task 3: in striped order a later rank's keys are met with j <= i: each query sees the token just after it.
from solution import *  # noqa: F403
from solution import Meeting
from solution import meeting as right


def meeting(order, mine, source, time):
    if order == "striped":
        return Meeting(causal=True)
    return right(order, mine, source, time)
