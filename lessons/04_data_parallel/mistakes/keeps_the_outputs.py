# task 4: keeps what the model returned for each part in a list until the end.
from solution import *  # noqa: F403


def accumulate(model, gradients, inputs, targets, microbatches, comm):
    some, wanted = (
        inputs.tensor_split(comm.size)[comm.rank],
        targets.tensor_split(comm.size)[comm.rank],
    )
    parts, outputs = (
        zip(some.tensor_split(microbatches), wanted.tensor_split(microbatches), strict=True),
        [],
    )
    try:
        for number, (part, goal) in enumerate(parts, start=1):
            gradients.synchronising = number == microbatches
            outputs.append(model(part))
            ((outputs[-1] - goal).square().sum() / len(inputs)).backward()
    finally:
        gradients.synchronising = True
    gradients.finish()
