# task 4: averages over the copies as over replicas, with their tokens alone: about ep times too large.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def synchronize(router, experts, tokens, edp, comm):
    total = torch.tensor(tokens)
    all_reduce(total, comm)
    of_copies = torch.tensor(tokens)
    all_reduce(of_copies, edp)
    for parameters, group in (([router], comm), (experts, edp)):
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            all_reduce(parameter.grad, group)
            parameter.grad /= total if group is comm else of_copies
