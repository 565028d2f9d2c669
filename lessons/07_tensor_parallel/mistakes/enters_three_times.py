# task 3: query, key and value enter by themselves: backward reduces three times what one all-reduce does.
import torch.nn.functional as F
from solution import *  # noqa: F403
from solution import copy_to, reduce_from

from minidist.full.model.gpt import causal_attention


def parallel_attention(x, mine, head_dim, comm):
    query, key, value = (
        F.linear(copy_to(x, comm), mine[name]).unflatten(-1, (-1, head_dim)).transpose(1, 2)
        for name in ("query", "key", "value")
    )
    found = causal_attention(query, key, value)
    return reduce_from(F.linear(found.transpose(1, 2).flatten(2), mine["output"]), comm)
