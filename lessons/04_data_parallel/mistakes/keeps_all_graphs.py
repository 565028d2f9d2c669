# task 4: adds up the losses and calls backward once: the activations of all microbatches are held at a time.
from solution import *  # noqa: F403


def accumulate(model, gradients, inputs, targets, microbatches, comm):
    some, wanted = (
        inputs.tensor_split(comm.size)[comm.rank],
        targets.tensor_split(comm.size)[comm.rank],
    )
    parts = zip(some.tensor_split(microbatches), wanted.tensor_split(microbatches), strict=True)
    sum((model(part) - goal).square().sum() / len(inputs) for part, goal in parts).backward()
    gradients.finish()
