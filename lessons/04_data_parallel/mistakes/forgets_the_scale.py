# task 4: divides by the rows of the microbatch: as many times too large as there are microbatches and ranks.
from solution import *  # noqa: F403


def accumulate(model, gradients, inputs, targets, microbatches, comm):
    some, wanted = (
        inputs.tensor_split(comm.size)[comm.rank],
        targets.tensor_split(comm.size)[comm.rank],
    )
    parts = zip(some.tensor_split(microbatches), wanted.tensor_split(microbatches), strict=True)
    for number, (part, goal) in enumerate(parts, start=1):
        gradients.synchronising = number == microbatches
        ((model(part) - goal).square().sum() / max(1, len(part))).backward()
    gradients.finish()
