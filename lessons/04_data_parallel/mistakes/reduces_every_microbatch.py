# task 4: synchronises in every microbatch: more messages, and what was summed already is summed again.
from solution import *  # noqa: F403


def accumulate(model, gradients, inputs, targets, microbatches, comm):
    some, wanted = (
        inputs.tensor_split(comm.size)[comm.rank],
        targets.tensor_split(comm.size)[comm.rank],
    )
    for part, goal in zip(
        some.tensor_split(microbatches), wanted.tensor_split(microbatches), strict=True
    ):
        ((model(part) - goal).square().sum() / len(inputs)).backward()
    gradients.finish()
