# task 4: leaves out experts that no token came to: their copies wait for a sum, for ever.
import torch
from solution import *  # noqa: F403

from minidist.full.collectives import all_reduce


def synchronize(router, experts, tokens, edp, comm):
    total = torch.tensor(tokens)
    all_reduce(total, comm)
    for parameters, group in (([router], comm), (experts, edp)):
        for parameter in parameters:
            if parameter.grad is None:
                continue
            all_reduce(parameter.grad, group)
            parameter.grad /= total
