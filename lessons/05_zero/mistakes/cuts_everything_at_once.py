# task 1: divides parameters and gradients from stage 1 on, which is stage 3.
from solution import *  # noqa: F403

BYTES = {"mixed": (2, 2, 12), "float32": (4, 4, 8), "8-bit moments": (2, 2, 6)}


def largest_model(memory, ranks, stage, recipe):
    parts = zip(BYTES[recipe], (1, 1, 1), strict=True)
    return int(memory / sum(bytes / (ranks if stage >= first else 1) for bytes, first in parts))
