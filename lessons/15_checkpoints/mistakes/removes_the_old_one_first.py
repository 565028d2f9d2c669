# task 2: makes room by removing earlier checkpoints before the new one is there.
import shutil

import solution
from solution import *  # noqa: F403


def save(folder, step, pieces, state, comm):
    if comm.rank == 0:
        for old in folder.glob("step-*"):
            shutil.rmtree(old)
    comm.barrier()
    solution.save(folder, step, pieces, state, comm)
