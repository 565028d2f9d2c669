# task 1: without rows returns a zero that does not come from the model: its gradients stay None.
import solution
import torch
from solution import *  # noqa: F403


def local_loss(model, inputs, targets, comm):
    if len(inputs.tensor_split(comm.size)[comm.rank]) == 0:
        return torch.zeros((), dtype=inputs.dtype, requires_grad=True)
    return solution.local_loss(model, inputs, targets, comm)
