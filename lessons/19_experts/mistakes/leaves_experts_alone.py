# task 4: does not add up gradients of experts, as if there were no other copies.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def synchronize(router, experts, tokens, edp, comm):
    total = torch.tensor(tokens)
    all_reduce(total, comm)
    for parameters, group in (([router], comm), (experts, None)):
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if group:
                all_reduce(parameter.grad, group)
            parameter.grad /= total
