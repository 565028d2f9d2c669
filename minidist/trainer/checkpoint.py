"""Checkpoints that survive being killed: written under another name, then renamed.

    runs/a/.writing-step-00000100/     a crash leaves this, and nobody reads it
    runs/a/step-00000100/              model.safetensors  optimizer.safetensors  state.json

A rename is one atomic act of the file system: a checkpoint is there whole, or not at all. `state.json` carries the size
and checksum of the two others, so one that was damaged later is refused too. Safetensors holds plain tensors: loading
one runs no code.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

TEMPORARY = ".writing-"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why, and what can be done."""


def save(
    folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], keep: int
) -> Path:
    """Write one checkpoint and forget all but the newest `keep`; return its folder. One rank calls this.

    `state` is whatever else the run needs to go on, fit for JSON.
    """
    final, temporary = folder / f"step-{step:08d}", folder / f"{TEMPORARY}step-{step:08d}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    weights = {name: tensor.detach().contiguous() for name, tensor in model.named_parameters()}
    save_file(weights, temporary / "model.safetensors")
    save_file(_flat_state(optimizer), temporary / "optimizer.safetensors")
    files = {path.name: _fingerprint(path) for path in sorted(temporary.iterdir())}
    (temporary / "state.json").write_text(json.dumps({"step": step, "files": files, **state}, indent=1))
    for path in [*temporary.iterdir(), temporary]:
        _flush(path)
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    _flush(folder)
    for old in complete(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def complete(folder: Path) -> list[Path]:
    """Return the finished checkpoints of a folder, oldest first; half-written ones are not among them."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def newest(folder: Path) -> Path:
    """Return the newest finished checkpoint.

    Raises
    ------
    CheckpointError
        If there is none.
    """
    found = complete(folder)
    if not found:
        raise CheckpointError(f"--resume finds no checkpoint in {folder}: start without it, or give the right --save")
    return found[-1]


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Fill model and optimizer from a checkpoint; return its `state`.

    Raises
    ------
    CheckpointError
        If a file is missing or damaged, or the checkpoint is another model's. Nothing has been changed then.
    """
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text())
        files = state["files"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path / 'state.json'} is missing or damaged ({error}): {_remedy(path)}") from None
    for name, (size, digest) in files.items():
        _check_file(path / name, size, digest)
    try:
        weights = load_file(path / "model.safetensors")
        moments = load_file(path / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): {_remedy(path)}") from None
    _check_model(path, model, weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    _load_flat_state(optimizer, moments)
    return state


def _check_file(path: Path, size: int, digest: str) -> None:
    if not path.exists():
        raise CheckpointError(f"{path} is missing: {_remedy(path.parent)}")
    if path.stat().st_size != size:
        raise CheckpointError(f"{path} is truncated: {path.stat().st_size} of {size} bytes: {_remedy(path.parent)}")
    if _fingerprint(path)[1] != digest:
        raise CheckpointError(
            f"{path} is damaged: its checksum is another than when it was written: {_remedy(path.parent)}"
        )


def _check_model(path: Path, model: nn.Module, weights: dict[str, Tensor]) -> None:
    wanted = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in model.named_parameters()}
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
    if wanted != found:
        name = next(iter(sorted(name for name in wanted | found if wanted.get(name) != found.get(name))))
        words = {True: "nothing", False: ""}
        raise CheckpointError(
            f"{path} belongs to another model: {name} is {found.get(name) or words[True]} there and "
            f"{wanted.get(name) or words[True]} here: use the options it was trained with, or another --save"
        )


def _remedy(path: Path) -> str:
    others = [other.name for other in complete(path.parent) if other != path]
    return f"remove it to resume from {others[-1]}" if others else "there is no other: start without --resume"


def _fingerprint(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Have the disk hold what was written: a rename must not overtake the data it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flat_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors as `parameter.moment`, the order of parameters being the model's."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": tensor.contiguous() for index, held in state.items() for name, tensor in held.items()}


def _load_flat_state(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
