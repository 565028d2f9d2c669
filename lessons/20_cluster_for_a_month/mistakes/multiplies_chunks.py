# task 4: multiplies the chunks that there are; any number that deals out the layers will do.
import solution
from solution import *  # noqa: F403


def diagnose(model, layout, batch, seconds, idle):
    found = solution.diagnose(model, layout, batch, seconds, idle)
    while found.remedy == "chunks" and (
        found.to % layout.chunks or model.layers % (layout.pp * found.to)
    ):
        found = found._replace(to=found.to + 1)
    return found
