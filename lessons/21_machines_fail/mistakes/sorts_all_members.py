# task 1: sorts all members by number, so ranks change hands though their processes are alive.
import solution
from solution import *  # noqa: F403


def next_view(last, here, dead, ranks):
    view = solution.next_view(last, here, dead, ranks)
    return view and view._replace(members=tuple(sorted(view.members)))
