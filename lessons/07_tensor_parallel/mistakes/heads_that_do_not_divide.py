# task 3: takes heads that cannot be dealt out evenly, and leaves some ranks with more, or with none.
from solution import *  # noqa: F403


def attention_slices(whole, heads, rank, ranks):
    slices = {
        name: whole[name].tensor_split(ranks)[rank].clone() for name in ("query", "key", "value")
    }
    return slices | {"output": whole["output"].tensor_split(ranks, dim=1)[rank].clone()}
