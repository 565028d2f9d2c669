# task 3: in striped order the mask is strict for other ranks' keys, also for those just before the query.
from solution import *  # noqa: F403
from solution import Meeting
from solution import meeting as right


def meeting(order, mine, source, time):
    if order == "striped" and source != mine:
        return Meeting(slice(1, None), slice(-1), causal=True) if time > 1 else None
    return right(order, mine, source, time)
