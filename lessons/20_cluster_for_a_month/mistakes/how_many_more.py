# task 4: says how many microbatches or chunks are to be added, not how many there are then.
import solution
from solution import *  # noqa: F403


def diagnose(model, layout, batch, seconds, idle):
    found = solution.diagnose(model, layout, batch, seconds, idle)
    now = {"microbatches": batch // (layout.dp * layout.microbatch), "chunks": layout.chunks}
    return found._replace(to=found.to - now.get(found.remedy, 0))
