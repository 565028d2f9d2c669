"""`python -m minidist export runs/a --to FOLDER`: turn a checkpoint into files that other programs read.

    runs/a/step-00000100/                    FOLDER/
      rank-0000.safetensors  ─┐
      rank-0001.safetensors  ─┼─ whole ────▶   model.safetensors   parameters under Hugging Face's names
      ...                    ─┘                                    (the optimizer's state stays behind)
      state.json             ── sizes ─────▶   config.json

One process does it, whatever layout of ranks wrote the checkpoint. It holds all parameters in memory once. The format
is that of Hugging Face's Llama, in the precision of the run; `train --init FOLDER` reads it as well.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from minidist.comm.job.number import NOT_NEGATIVE, flag_of
from minidist.launch.parser import Parser
from minidist.model import GPT, GPTConfig
from minidist.trainer.checkpoint import restore, store
from minidist.trainer.checkpoint.pieces import Extent, Piece
from minidist.trainer.checkpoint.store import CheckpointError
from minidist.trainer.files import reason
from minidist.trainer.foreign.llama import CONFIG_FILE, WEIGHTS_FILE, write_llama

COMMAND = "minidist export"


def main(argv: Sequence[str]) -> int:
    """Export a checkpoint and say how to load it; return the exit status: 0, or 2 for input that cannot be used."""
    parser = Parser(prog=COMMAND, description="Make a Hugging Face Llama of a checkpoint.")
    parser.add_argument("run", type=Path, help="the folder that was given to train --save")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="a new folder, or an empty one")
    parser.add_argument("--step", type=flag_of(int, NOT_NEGATIVE), help="which checkpoint; none: the newest")
    options = parser.parse_args(argv)
    try:
        checkpoint = find(options.run, options.step)
        print(export(checkpoint, options.to))
    except CheckpointError as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 2
    return 0


def find(run: Path, step: int | None = None) -> Path:
    """Return the checkpoint of a step of a run, by default the newest.

    Raises
    ------
    CheckpointError
        If there is none.
    """
    there = store.complete(run)
    if not there:
        if store.complete(run.parent) and run.is_dir():
            raise CheckpointError(f"{run} is no run: give the folder around it, {run.parent} --step NUMBER")
        raise CheckpointError(f"{run} has no checkpoint: give the folder that was given to train --save")
    if step is None:
        return there[-1]
    if store.final_of(run, step) not in there:
        steps = ", ".join(str(store.step_of(path)) for path in there)
        raise CheckpointError(f"{run} has no checkpoint of step {step}: give --step one of {steps}")
    return store.final_of(run, step)


def export(checkpoint: Path, folder: Path) -> str:
    """Compare all checksums, then write a Llama to a new or an empty folder; return words that say what is there now.

    Raises
    ------
    CheckpointError
        If the checkpoint is damaged, or the folder is in use or cannot be written. The folder is then left as it was.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(f"--to {folder} is there already and is not overwritten: give a new folder")
    except OSError as error:
        raise _unwritten(folder, error) from None
    restore.verify(checkpoint)
    state = restore.read_state(checkpoint)
    config = _sizes(checkpoint, state)
    weights = read_parameters(checkpoint, config)
    _write(config, weights, folder)
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    tokenizer = restore.state_at(checkpoint, state, "config", "data", "tokenizer", kind=str, default="")
    return (
        f"{config.parameter_count:,} parameters of {checkpoint} in {dtype}, written to {folder}: "
        f"{CONFIG_FILE}, {WEIGHTS_FILE}\n"
        f'load them with transformers.AutoModelForCausalLM.from_pretrained("{folder}", dtype="{dtype}"), or go on '
        f"training with --init {folder}\n{_of_tokens(tokenizer)}"
    )


def read_parameters(checkpoint: Path, config: GPTConfig) -> dict[str, Tensor]:
    """Return all parameters of a checkpoint, each whole, under our names, in the dtype of the run.

    Raises
    ------
    CheckpointError
        If it is damaged, or not of a model of these sizes. Checksums are left to `restore.verify`.
    """
    there = restore.names(checkpoint)
    wanted = []
    for name, parameter in GPT(config, device="meta").named_parameters():
        dtype = there[name][0] if name in there else torch.float32  # a missing one is named by `read`
        wanted.append(Piece(name, Extent.of(parameter.shape), torch.empty(parameter.shape, dtype=dtype)))
    restore.read(checkpoint, wanted)
    return {piece.name: piece.tensor for piece in wanted}


def _sizes(checkpoint: Path, state: dict[str, Any]) -> GPTConfig:
    try:
        return GPTConfig(**state["model"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{checkpoint} does not say of which GPT it is: only those of train can be exported"
        ) from None


def _write(config: GPTConfig, weights: dict[str, Tensor], folder: Path) -> None:
    made = not folder.exists()
    try:
        write_llama(config, weights, folder)
        # Some versions of safetensors make files that only their owner may read; this one is to be passed on
        (folder / WEIGHTS_FILE).chmod((folder / CONFIG_FILE).stat().st_mode)
    except (OSError, SafetensorError) as error:
        if folder.is_dir():
            for name in (WEIGHTS_FILE, CONFIG_FILE):
                (folder / name).unlink(missing_ok=True)
                (folder / f"{name}.partial").unlink(missing_ok=True)
            if made:
                folder.rmdir()
        raise _unwritten(folder, error) from None


def _unwritten(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"--to {folder} cannot be written ({reason(error)}): give another folder")


def _of_tokens(tokenizer: str) -> str:
    """Say how text becomes the tokens that the model knows: what is written does not tell."""
    if tokenizer:
        return f"its tokenizer is not written with it: copy {tokenizer} there, as tokenizer.json"
    return "there is no tokenizer: a token is one byte, torch.tensor([list(text.encode())])"
