# task 2: nobody waits for the rename, so a rank goes on as if there were a checkpoint.
from types import SimpleNamespace

import solution
from solution import *  # noqa: F403


def save(folder, step, pieces, state, comm):
    barriers = iter((comm.barrier, lambda: None))
    impatient = SimpleNamespace(
        rank=comm.rank, all_gather_object=comm.all_gather_object, barrier=lambda: next(barriers)()
    )
    solution.save(folder, step, pieces, state, impatient)
