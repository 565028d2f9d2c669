# task 4: divides by the number of its own tokens, and ranks have different numbers.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def synchronize(router, experts, tokens, edp, comm):
    total = torch.tensor(tokens)
    for parameters, group in (([router], comm), (experts, edp)):
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            all_reduce(parameter.grad, group)
            parameter.grad /= total
