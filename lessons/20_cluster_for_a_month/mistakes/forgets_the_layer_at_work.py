# task 2: forgets that the layer that is computed again is there as a whole.
import solution
from solution import *  # noqa: F403


def held(model, layout, batch):
    found = solution.held(model, layout, batch)
    if layout.recompute:
        sbh = model.sequence * layout.microbatch * model.hidden
        whole = sbh * (34 / layout.tp if layout.sp else 10 + 24 / layout.tp)
        found["activations"] -= whole - 2 * sbh / (layout.tp if layout.sp else 1)
    return found
