# task 2: writes into the folder that a killed run has left, with its files in it.

import solution
from solution import *  # noqa: F403


def save(folder, step, pieces, state, comm):
    litter = folder / f".unfinished-{step:08d}" / "rank-0009.safetensors"
    kept = litter.read_bytes() if litter.exists() else b""
    comm.barrier()
    solution.save(folder, step, pieces, state, comm)
    if comm.rank == 0 and kept:
        (folder / f"step-{step:08d}" / litter.name).write_bytes(kept)
    comm.barrier()
