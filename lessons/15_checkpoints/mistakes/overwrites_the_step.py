# task 2: removes a checkpoint of the same step that is there already, and writes another.
import json
import os
import shutil

from safetensors.torch import save_file
from solution import *  # noqa: F403


def flush(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def save(folder, step, pieces, state, comm):
    final, unfinished = folder / f"step-{step:08d}", folder / f".unfinished-{step:08d}"
    if comm.rank == 0:
        for remains in folder.glob(".unfinished*"):
            shutil.rmtree(remains) if remains.is_dir() else remains.unlink()
        shutil.rmtree(final, ignore_errors=True)
        unfinished.mkdir(parents=True)
    comm.barrier()
    if pieces:
        tensors = {name: piece.values for name, piece in pieces.items()}
        save_file(tensors, unfinished / f"rank-{comm.rank:04d}.safetensors")
        flush(unfinished / f"rank-{comm.rank:04d}.safetensors")
    index = {}
    mine = {name: (piece.shape, piece.start, len(piece.values)) for name, piece in pieces.items()}
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
            (unfinished / name).write_text(json.dumps(content))
            flush(unfinished / name)
        flush(unfinished)
        unfinished.rename(final)
    comm.barrier()
