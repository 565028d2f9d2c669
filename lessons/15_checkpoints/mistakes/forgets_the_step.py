# task 4: does not restore the number of steps, by which Adam corrects its moments.
import solution
from solution import *  # noqa: F403


def restore(run, arrays, facts):
    step = run.step
    solution.restore(run, arrays, facts)
    run.step = step
