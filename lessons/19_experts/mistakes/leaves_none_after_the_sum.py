# task 4: takes part in the sum with zeros where there is no gradient, and leaves `.grad` None all the same.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def synchronize(router, experts, tokens, edp, comm):
    total = torch.tensor(tokens)
    all_reduce(total, comm)
    for parameters, group in (([router], comm), (experts, edp)):
        for parameter in parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            all_reduce(gradient, group)
            gradient /= total
