# task 3: deals out channels one by one instead of whole heads: a query then meets the wrong keys.
from solution import *  # noqa: F403


def attention_slices(whole, heads, rank, ranks):
    if heads % ranks:
        raise ValueError("the heads cannot be dealt out")
    slices = {name: whole[name][rank::ranks].clone() for name in ("query", "key", "value")}
    return slices | {"output": whole["output"][:, rank::ranks].clone()}
