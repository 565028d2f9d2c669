# task 1: gives the ranks of the lost to newcomers, in front of some who are left.
import solution
from solution import *  # noqa: F403


def next_view(last, here, dead, ranks):
    view = solution.next_view(last, here, dead, ranks)
    if view is None:
        return None
    new = [member for member in view.members if member not in last.members]
    places = [
        member if member in view.members else new.pop(0)
        for member in last.members
        if member in view.members or new
    ]
    return view._replace(members=tuple([*places, *new][:ranks]))
