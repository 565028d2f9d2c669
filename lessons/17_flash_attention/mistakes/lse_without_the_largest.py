# task 2: returns the logarithm of the sum, which is relative to the largest score, and forgets to add that.
import solution
import torch
from solution import *  # noqa: F403


def attend_stream(query, blocks):
    largest = torch.full_like(query[..., 0], -torch.inf)

    def looked_at():
        nonlocal largest
        for key, value in blocks:
            largest = torch.maximum(largest, (query @ key.mT / query.shape[-1] ** 0.5).amax(-1))
            yield key, value

    output, lse = solution.attend_stream(query, looked_at())
    return output, lse - largest
