# task 4: gathers the whole table: V D numbers travel and are held, instead of those of the tokens.
import torch.nn.functional as F
from solution import *  # noqa: F403

from minidist.full.adjoint import gather_from


def parallel_embedding(tokens, mine, vocabulary, comm):
    return F.embedding(tokens, gather_from(mine, comm, 0, vocabulary))
