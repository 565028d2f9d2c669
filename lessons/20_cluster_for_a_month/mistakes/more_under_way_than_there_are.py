# task 2: holds p microbatches also where a replica has fewer.
import solution
from solution import *  # noqa: F403


def held(model, layout, batch):
    found = solution.held(model, layout, batch)
    if layout.recompute:
        return found
    m = batch // (layout.dp * layout.microbatch)
    most, least = (solution.in_flight(layout.pp, each, layout.chunks) for each in (1e9, m))
    return found | {"activations": found["activations"] * most / least}
