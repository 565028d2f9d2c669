# task 4: adds up gradients of experts over all ranks, as those of the router: they are other experts.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def synchronize(router, experts, tokens, edp, comm):
    total = torch.tensor(tokens)
    all_reduce(total, comm)
    for parameters, group in (([router], comm), (experts, comm)):
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            all_reduce(parameter.grad, group)
            parameter.grad /= total
