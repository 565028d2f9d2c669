# task 1: counts keys and values for each query head: in grouped-query attention there are fewer.
from solution import *  # noqa: F403


def flash_bytes(batch, heads, kv_heads, tokens, head_size, itemsize):
    return batch * heads * tokens * (4 * head_size * itemsize + 4)
