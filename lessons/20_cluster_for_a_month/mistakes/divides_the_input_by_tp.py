# task 2: divides the input of a layer by tp without sequence parallelism; it is whole on each rank.
import solution
from solution import *  # noqa: F403


def held(model, layout, batch):
    found = solution.held(model, layout, batch)
    if layout.recompute and not layout.sp:
        m, sbh = (
            batch // (layout.dp * layout.microbatch),
            model.sequence * layout.microbatch * model.hidden,
        )
        kept = solution.in_flight(layout.pp, m, layout.chunks) * model.layers / layout.pp - 1
        found["activations"] -= kept * 2 * sbh * (1 - 1 / layout.tp)
    return found
