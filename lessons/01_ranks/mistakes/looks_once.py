# task 5: goes through the ranks once: messages that become possible through a later one are missed.
from solution import *  # noqa: F403


def who_never_finishes(plans):
    left = [list(plan) for plan in plans]
    for rank, plan in enumerate(left):
        while plan and plan[0][0] == "send" and left[plan[0][1]][:1] == [("recv", rank)]:
            left[plan.pop(0)[1]].pop(0)
    return [rank for rank, plan in enumerate(left) if plan]
