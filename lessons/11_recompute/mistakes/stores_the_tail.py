# task 5: checkpoints what comes before a part that communicates; what is behind the last one is stored.
import solution
from solution import *  # noqa: F403


def checkpoint_between(parts, x):
    last = max(i for i, (_, communicates) in enumerate(parts) if communicates)
    x = solution.checkpoint_between(parts[: last + 1], x)
    for module, _ in parts[last + 1 :]:
        x = module(x)
    return x
