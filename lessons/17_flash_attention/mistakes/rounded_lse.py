# task 1: counts lse in the precision of the rest: it is float32 always.
from solution import *  # noqa: F403


def flash_bytes(batch, heads, kv_heads, tokens, head_size, itemsize):
    return batch * tokens * itemsize * (2 * (heads + kv_heads) * head_size + heads)
