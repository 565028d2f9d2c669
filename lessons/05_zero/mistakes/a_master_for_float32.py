# task 1: counts a master copy in float32, where the parameters are their own masters.
from solution import *  # noqa: F403

BYTES = {"mixed": (2, 2, 12), "float32": (4, 4, 12), "8-bit moments": (2, 2, 6)}


def largest_model(memory, ranks, stage, recipe):
    parts = zip(BYTES[recipe], (3, 2, 1), strict=True)
    return int(memory / sum(bytes / (ranks if stage >= first else 1) for bytes, first in parts))
