# task 2: writes into the folder that readers look for; a crash leaves a part of a checkpoint there.
import json
import os

from safetensors.torch import save_file
from solution import *  # noqa: F403


def flush(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write(folder, step, pieces, state, comm):
    file = f"rank-{comm.rank:04d}.safetensors"
    if pieces:
        save_file({name: piece.values for name, piece in pieces.items()}, folder / file)
        flush(folder / file)
    mine = {name: (piece.shape, piece.start, len(piece.values)) for name, piece in pieces.items()}
    index = {}
    for rank, told in enumerate(comm.all_gather_object(mine)):
        for name, (shape, start, count) in told.items():
            entry = index.setdefault(
                name, {"dtype": "float64", "shape": shape, "dim": None, "pieces": []}
            )
            place = {
                "file": f"rank-{rank:04d}.safetensors",
                "block": [0, 0],
                "elements": [start, start + count],
            }
            entry["pieces"].append(place)
    if comm.rank == 0:
        for name, content in {
            "index.json": {"tensors": index},
            "state.json": {"step": step, **state},
        }.items():
            (folder / name).write_text(json.dumps(content))
            flush(folder / name)
    comm.barrier()


def save(folder, step, pieces, state, comm):
    final = folder / f"step-{step:08d}"
    final.mkdir(parents=True, exist_ok=True)
    comm.barrier()
    write(final, step, pieces, state, comm)
