# task 4: an error in a microbatch leaves synchronising off, so the ranks drift apart in the next step without a word.
from solution import *  # noqa: F403


def accumulate(model, gradients, inputs, targets, microbatches, comm):
    some, wanted = (
        inputs.tensor_split(comm.size)[comm.rank],
        targets.tensor_split(comm.size)[comm.rank],
    )
    parts = zip(some.tensor_split(microbatches), wanted.tensor_split(microbatches), strict=True)
    for number, (part, goal) in enumerate(parts, start=1):
        gradients.synchronising = number == microbatches
        ((model(part) - goal).square().sum() / len(inputs)).backward()
    gradients.finish()
