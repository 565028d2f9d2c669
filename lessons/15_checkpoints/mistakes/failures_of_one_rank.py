# task 5: takes the time between failures of one rank for that of the job.
import solution
from solution import *  # noqa: F403


def interval(write_seconds, mtbf_seconds, ranks):
    return solution.interval(write_seconds, mtbf_seconds, 1)
