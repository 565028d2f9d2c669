"""Checkpoints that survive being killed: written under another name, then renamed.

    runs/a/step-00000100/     model.safetensors  optimizer.safetensors  state.json  SHA256SUMS
    runs/a/.unfinished/       what a killed run was writing, or removing; nobody reads it

A rename is one atomic act of the file system: a checkpoint is there whole, or not at all. No complete one is ever
overwritten, and an old one is removed only after the new one is there. What the disk damages later is found out by
`SHA256SUMS` (`sha256sum -c` reads it too). Safetensors holds plain tensors: loading one runs no code.
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

SUMS, UNFINISHED = "SHA256SUMS", ".unfinished"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why, and what can be done."""


def save(
    folder: Path, step: int, model: nn.Module, moments: dict[str, Tensor], state: dict[str, Any], keep: int
) -> Path:
    """Write one checkpoint and forget all but the newest `keep`; return its folder. One rank calls this.

    `moments` is the `flat_state` of the optimizer; `state` whatever else the run needs to go on, fit for JSON.

    Raises
    ------
    CheckpointError
        If the disk is full or refuses. The earlier checkpoints are intact then.
    """
    final, unfinished = folder / f"step-{step:08d}", folder / UNFINISHED
    try:
        _remove(unfinished)
        unfinished.mkdir(parents=True)
        _write(unfinished, model, moments, {"step": step, **state})
        unfinished.rename(final)  # fails if there is one already
        _flush(folder)
        for old in complete(folder)[:-keep]:
            old.rename(unfinished)  # so that nobody takes what is half removed for a checkpoint
            _remove(unfinished)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        there = complete(folder)
        intact = f"{there[-1].name} is intact: --resume continues from it" if there else "none was written before"
        raise CheckpointError(f"the checkpoint {final} cannot be written ({_reason(error)}); {intact}") from None
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
        _check_sums(path)
        state: dict[str, Any] = json.loads((path / "state.json").read_text())
        weights = load_file(path / "model.safetensors")
        moments = load_file(path / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({_reason(error)}): {_remedy(path)}") from None
    _check_model(path, model, weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    _load_flat_state(optimizer, moments)
    return state


# ---------------------------------------------------------------- files


def _write(folder: Path, model: nn.Module, moments: dict[str, Tensor], state: dict[str, Any]) -> None:
    weights = {name: tensor.detach().contiguous() for name, tensor in model.named_parameters()}
    save_file(weights, folder / "model.safetensors")
    save_file(moments, folder / "optimizer.safetensors")
    (folder / "state.json").write_text(json.dumps(state, indent=1))
    sums = [f"{_digest(path)}  {path.name}\n" for path in sorted(folder.iterdir())]
    (folder / SUMS).write_text("".join(sums))
    for path in [*folder.iterdir(), folder]:
        _flush(path)


def _check_sums(path: Path) -> None:
    sums = (path / SUMS).read_text(errors="replace")
    named = {name: digest for digest, _, name in (line.partition("  ") for line in sums.splitlines())}
    if named.keys() != {"model.safetensors", "optimizer.safetensors", "state.json"}:
        raise CheckpointError(f"{path / SUMS} is damaged: it does not name the three files: {_remedy(path)}")
    for name, digest in named.items():
        if _digest(path / name) != digest:
            raise CheckpointError(
                f"{path / name} is truncated or damaged: its checksum is not the one in {SUMS}: {_remedy(path)}"
            )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Have the disk hold what was written: a rename must not overtake the data it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _remedy(path: Path) -> str:
    earlier = [other.name for other in complete(path.parent) if other < path]
    if earlier:
        return f"remove {path.name} to resume from {earlier[-1]}"
    return "there is no earlier one: start afresh, with another --save"


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {Path(error.filename).name}" if error.filename else error.strerror
    return str(error)


# ---------------------------------------------------------------- tensors


def _check_model(path: Path, model: nn.Module, weights: dict[str, Tensor]) -> None:
    wanted = {name: _words(tensor) for name, tensor in model.named_parameters()}
    found = {name: _words(tensor) for name, tensor in weights.items()}
    for name in sorted(wanted | found):
        there, here = found.get(name, "missing"), wanted.get(name, "missing")
        if there != here:
            raise CheckpointError(
                f"{path} belongs to another model: {name} is {there} there and {here} here: use the options it was "
                "trained with, or another --save"
            )


def _words(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def flat_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's tensors as `parameter.moment`. Of a sharded one they are gathered: it is collective."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": tensor.contiguous() for index, held in state.items() for name, tensor in held.items()}


def _load_flat_state(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
