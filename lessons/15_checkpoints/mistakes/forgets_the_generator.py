# task 4: does not restore the generator: other dropout, another order of the next epoch.
import solution
from solution import *  # noqa: F403


def restore(run, arrays, facts):
    solution.restore(run, arrays, {**facts, "generator": run.generator.bit_generator.state})
