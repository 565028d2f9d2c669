# task 3: takes the nearest of 16 evenly spaced levels: most of them lie where there are hardly any weights.
import solution
import torch
from solution import *  # noqa: F403


def quantize(weights):
    _, scales, steps, mean = solution.quantize(weights)
    flat = torch.nn.functional.pad(weights.flatten(), (0, -weights.numel() % 64)).view(-1, 64)
    wide = scales * steps.repeat_interleave(256)[: len(scales)] + mean
    even = (
        (flat / wide[:, None] * 7)
        .round()
        .clamp(-7, 8)
        .add(7)
        .to(torch.uint8)
        .flatten()[: weights.numel()]
    )
    even = torch.nn.functional.pad(even, (0, weights.numel() % 2))
    return even[::2] << 4 | even[1::2], scales, steps, mean
