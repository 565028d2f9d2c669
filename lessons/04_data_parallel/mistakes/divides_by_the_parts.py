# task 4: divides each part's loss by the number of parts as well: all parts together are the mean of the batch already.
from solution import *  # noqa: F403


def accumulate(model, gradients, inputs, targets, microbatches, comm):
    some, wanted = (
        inputs.tensor_split(comm.size)[comm.rank],
        targets.tensor_split(comm.size)[comm.rank],
    )
    parts = zip(some.tensor_split(microbatches), wanted.tensor_split(microbatches), strict=True)
    try:
        for number, (part, goal) in enumerate(parts, start=1):
            gradients.synchronising = number == microbatches
            ((model(part) - goal).square().sum() / len(inputs) / microbatches).backward()
    finally:
        gradients.synchronising = True
    gradients.finish()
