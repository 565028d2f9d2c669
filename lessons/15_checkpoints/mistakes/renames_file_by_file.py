# task 2: each file is renamed when it is complete, but the checkpoint is several files: a crash between leaves some.
import solution
from solution import *  # noqa: F403


def save(folder, step, pieces, state, comm):
    solution.save(folder / f".hidden-{step}", step, pieces, state, comm)
    final = folder / f"step-{step:08d}"
    if comm.rank == 0:
        final.mkdir()
        for file in sorted((folder / f".hidden-{step}" / final.name).iterdir()):
            file.rename(final / file.name)
    comm.barrier()
