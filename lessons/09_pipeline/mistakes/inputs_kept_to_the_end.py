# task 5: never takes a microbatch's input and output out of its list, though backward has freed the graph.
from honest import run_step as right
from solution import *  # noqa: F403


def run_step(words, stage, loss, inputs, targets, comm):
    kept = []

    def remembered(x):
        kept.append((x, stage(x)))
        return kept[-1][1]

    return right(words, remembered, loss, inputs, targets, comm)
