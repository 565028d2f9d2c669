# task 3: rounds scales to the nearest step, so the largest weights of half of the blocks lie outside of all levels.
import solution
import torch
from solution import *  # noqa: F403


def quantize(weights):
    codes, _, steps, mean = solution.quantize(weights)
    flat = torch.nn.functional.pad(weights.flatten(), (0, -weights.numel() % 64)).view(-1, 64)
    step = steps.repeat_interleave(256)[: len(flat)]
    return (
        codes,
        ((flat.abs().amax(1) - mean) / torch.where(step == 0, 1, step)).round().to(torch.int8),
        steps,
        mean,
    )
