# task 1: counts Adam's two moments of one byte and forgets the master copy, which stays in 32 bits.
from solution import *  # noqa: F403

BYTES = {"mixed": (2, 2, 12), "float32": (4, 4, 8), "8-bit moments": (2, 2, 2)}


def largest_model(memory, ranks, stage, recipe):
    parts = zip(BYTES[recipe], (3, 2, 1), strict=True)
    return int(memory / sum(bytes / (ranks if stage >= first else 1) for bytes, first in parts))
