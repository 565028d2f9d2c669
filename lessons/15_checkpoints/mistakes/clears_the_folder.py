# task 2: clears the whole folder before it writes, with every earlier checkpoint in it.
import shutil

import solution
from solution import *  # noqa: F403


def save(folder, step, pieces, state, comm):
    if comm.rank == 0:
        shutil.rmtree(folder)
    comm.barrier()
    solution.save(folder, step, pieces, state, comm)
