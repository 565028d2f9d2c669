# task 2: gives each rank C // P channels and the rest to the last one, which all others then wait for.
from solution import *  # noqa: F403


def mlp_slices(whole, rank, ranks):
    channels = len(whole["up.bias"])
    each = channels // ranks
    own = slice(rank * each, channels if rank == ranks - 1 else (rank + 1) * each)
    return {
        "up.weight": whole["up.weight"][own].clone(),
        "up.bias": whole["up.bias"][own].clone(),
        "down.weight": whole["down.weight"][:, own].clone(),
        "down.bias": whole["down.bias"].clone(),
    }
