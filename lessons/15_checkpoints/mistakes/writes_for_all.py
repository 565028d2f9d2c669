# task 2: gives all values to `all_gather_object`, and rank 0 alone writes every file: slow as one disk, in one memory.
import json
import os
import shutil

import torch
from safetensors.torch import save_file
from solution import *  # noqa: F403


def save(folder, step, pieces, state, comm):
    final, aside = folder / f"step-{step:08}", folder / f".unfinished-{step:08}"
    if any(comm.all_gather_object(final.exists())):
        raise FileExistsError(final)
    mine = {
        name: (piece.shape, piece.start, piece.values.tolist()) for name, piece in pieces.items()
    }
    everybody = comm.all_gather_object(mine)
    if comm.rank == 0:
        for left in folder.glob(".unfinished*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        aside.mkdir(parents=True)
        tensors = {}
        for rank, theirs in enumerate(everybody):
            file = f"rank-{rank:04}.safetensors"
            whole = {
                name: torch.tensor(one[2], dtype=torch.float64) for name, one in theirs.items()
            }
            if whole:
                save_file(whole, aside / file)
            for name, (shape, start, values) in theirs.items():
                empty = {"dtype": "float64", "shape": list(shape), "dim": None, "pieces": []}
                elements = [start, start + len(values)]
                piece = {"file": file, "block": [0, 0], "elements": elements}
                tensors.setdefault(name, empty)["pieces"].append(piece)
        (aside / "index.json").write_text(json.dumps({"tensors": tensors}))
        (aside / "state.json").write_text(json.dumps({"step": step, **state}))
        for path in aside.iterdir():
            with path.open() as file:
                os.fsync(file.fileno())
        aside.rename(final)
    comm.barrier()
