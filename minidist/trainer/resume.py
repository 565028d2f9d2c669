"""Continuing a run: what is read, and compared with what is asked for now, before any work starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from minidist.comm import Communicator
from minidist.memory.precision import LossScaler
from minidist.model import GPT
from minidist.trainer import restore, store
from minidist.trainer.batches import Batches
from minidist.trainer.config import Config, Sections
from minidist.trainer.store import CheckpointError


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on: after `step` steps, with the tensors of the checkpoint `path`."""

    path: Path
    step: int
    changed: list[str]  # options that shape the numbers and are not what they were


def prepare(config: Config, model: GPT, batches: Batches, scaler: LossScaler | None, comm: Communicator) -> Resumed:
    """Find the newest checkpoint, look whether it can be continued, and set position and loss scale. Sends nothing.

    The ranks share out the work of comparing checksums: what one of them finds, the caller has to tell the others.

    Raises
    ------
    CheckpointError
        If there is none, it is damaged, or belongs to another model, text, or a longer run.
    """
    path = store.newest(Path(config.run.save))
    restore.verify(path, restore.files_of(path)[comm.rank :: comm.size])
    state = restore.read_state(path)
    _check_parameters(path, model)
    for name, now in asdict(model.config).items():
        if name != "dropout" and state["model"].get(name) != now:
            raise CheckpointError(
                f"{path} belongs to another model: {name} is {state['model'].get(name)} there and {now} here: use "
                f"the options it was trained with, or another --save"
            )
    try:
        batches.load_state_dict(state["batches"])
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be continued: {error}") from None
    step = int(state["step"])
    if step > config.run.steps:
        raise CheckpointError(
            f"{path} has {step} steps behind it, more than --steps {config.run.steps}: use --steps {step} to look at "
            f"it, or more to train on"
        )
    if scaler is not None and state.get("scaler"):
        scaler.load_state_dict(state["scaler"])
    return Resumed(path, step, changed_options(state["config"], config.sections()))


def _check_parameters(path: Path, model: GPT) -> None:
    there = {name: _words(*tensor) for name, tensor in restore.names(path).items() if "/" not in name}
    here = {name: _words(parameter.dtype, parameter.shape) for name, parameter in model.named_parameters()}
    for name in sorted(there | here):
        if there.get(name) != here.get(name):
            raise CheckpointError(
                f"{path} belongs to another model: {name} is {there.get(name, 'missing')} there and "
                f"{here.get(name, 'missing')} here: use the options it was trained with, or another --save"
            )


def _words(dtype: torch.dtype, shape: Iterable[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def changed_options(before: Sections, now: Sections) -> list[str]:
    """Return, in words, the options that shape the numbers of a run and are not what they were."""
    names = [("model", "dropout"), ("data", "batch"), ("run", "steps")]
    names += [("optimizer", name) for name in now["optimizer"]]
    old_and_new = [(name, before[section].get(name), now[section][name]) for section, name in names]
    return [f"{name} {old} -> {new}" for name, old, new in old_and_new if old != new]
