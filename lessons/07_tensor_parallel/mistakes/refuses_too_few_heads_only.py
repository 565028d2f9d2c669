# task 3: refuses more ranks than heads, and not heads that the ranks do not divide: one rank then has more work.
from solution import *  # noqa: F403

from minidist.full.collectives.fast import cut


def attention_slices(whole, heads, rank, ranks):
    if ranks > heads:
        raise ValueError(f"{heads} heads are too few for {ranks} ranks")
    counts = [many * len(whole["query"]) // heads for many in cut(heads, ranks)]
    return {
        name: each.split(counts, dim=int(name == "output"))[rank].clone()
        for name, each in whole.items()
    }
