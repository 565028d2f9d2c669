# task 4: divides the gradients of experts by ep, since tokens of ep ranks came: all of these count.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def synchronize(router, experts, tokens, edp, comm):
    total = torch.tensor(tokens)
    all_reduce(total, comm)
    for parameters, group in (([router], comm), (experts, edp)):
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            all_reduce(parameter.grad, group)
            parameter.grad /= total * (1 if group is comm else comm.size // edp.size)
