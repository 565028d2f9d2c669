"""`python -m minidist export runs/a --to FOLDER`: turn a checkpoint into files that other programs
read.

    runs/a/step-00000100/                    FOLDER/
      rank-0000.safetensors  ─┐
      rank-0001.safetensors  ─┼─ whole ────▶   model.safetensors   parameters under Hugging Face's names
      ...                    ─┘                                    (the optimizer's state stays behind)
      state.json             ── sizes ─────▶   config.json
    the folder of --init     ── copied ────▶   tokenizer.json, and what else a model is published with

One process does it, whatever layout of ranks wrote the checkpoint. It holds all parameters in
memory once. The format is that of Hugging Face's Llama, or Mixtral, in the precision of the run;
`train --init FOLDER` reads it as well.

A checkpoint of adapters has no other weights: those are read from the folder that the run began
from. Adapters are folded into them (W + alpha/r BA), or with `--adapters` written alone, as Hugging
Face's PEFT reads them.
"""

import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from minidist.full.adapters import merge
from minidist.full.checkpoint import restore, store
from minidist.full.checkpoint.pieces import Extent, Piece
from minidist.full.checkpoint.remembered import sites_in
from minidist.full.checkpoint.store import CheckpointError
from minidist.full.data.files import retold
from minidist.full.launch.parser import Parser
from minidist.full.model import GPT, GPTConfig
from minidist.full.options import NOT_NEGATIVE
from minidist.full.trainer.config import Config, ConfigError
from minidist.full.trainer.foreign.llama import (
    COMPANIONS,
    CONFIG_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    write_llama,
)
from minidist.full.trainer.foreign.llama_names import check_known
from minidist.full.trainer.foreign.peft import ADAPTER_FILES, write_peft
from minidist.full.trainer.resume import check_base, fingerprint, load_initial
from minidist.further import Recipe
from minidist.further.nf4.strategy import QuantizedAdapters

COMMAND = "minidist export"


def main(argv: Sequence[str]) -> int:
    """Export a checkpoint and say how to load it.

    Return the exit status: 0, or 2 for input that cannot be used.
    """
    parser = Parser(prog=COMMAND, description="Make a Hugging Face Llama of a checkpoint.")
    run = (
        "the folder that was given to train --save, for its newest checkpoint; or the folder of a "
        "checkpoint"
    )
    parser.add_argument("run", type=Path, help=run)
    parser.add_argument(
        "--to", type=Path, required=True, metavar="FOLDER", help="a new folder, or an empty one"
    )
    parser.add_argument(
        "--adapters", action="store_true", help="write the adapters of a run with --lora, for PEFT"
    )
    options = parser.parse_args(argv)
    try:
        print(export(find(options.run), options.to, options.adapters))
    except CheckpointError as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return 2
    return 0


def find(folder: Path) -> Path:
    """Return the newest checkpoint of a run, or the checkpoint that this folder is.

    Raises
    ------
    CheckpointError
        If there is none.
    """
    there = [folder] if folder in store.complete(folder.parent) else store.complete(folder)
    if not there:
        raise CheckpointError(
            f"{folder} has no checkpoint: give the folder that was given to train --save"
        )
    return there[-1]


def export(checkpoint: Path, folder: Path, adapters: bool = False) -> str:
    """Compare all checksums, then write a Llama to a new or an empty folder.

    Return words that say what is there now.

    With `adapters`, write these alone.

    Raises
    ------
    CheckpointError
        If the checkpoint is damaged, has values that are not finite, or has no adapters, or the
        weights beside which they were trained are gone or changed; or if the folder is in use or
        cannot be written. The folder is then left as it was.
    """
    with _writing(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(
                f"--to {folder} is there already and is not overwritten: give a new folder"
            )
    restore.verify(checkpoint)
    state = restore.read_state(checkpoint)
    saved = partial(restore.state_at, checkpoint, state)
    try:
        config = GPTConfig(**state["model"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{checkpoint} does not say of which GPT it is: export those of train"
        ) from None
    with retold(CheckpointError, ValueError, before=f"{checkpoint}: ", words=Config.in_flags):
        check_known(config)
    if state.get("base"):
        model = read_adapted(checkpoint, state, config)
        _check_finite(checkpoint, model.named_parameters())
        if adapters:
            base = saved("config", "run", "init", kind=str)
            _write(ADAPTER_FILES, partial(write_peft, model, base), folder)
            in_bits = (
                ", in the 4 bits (nf4) beside which they were trained"
                if saved("config", "run", "qlora", kind=bool)
                else ""
            )
            return (
                f"the adapters of {checkpoint}, written to {folder}: {', '.join(ADAPTER_FILES)}\n"
                f'load them with peft.PeftModel.from_pretrained(model, "{folder}"), beside the model '
                f"in {base}{in_bits}"
            )
        merge(model)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    elif adapters:
        raise CheckpointError(
            f"{checkpoint} has no adapters, but all parameters: leave --adapters out"
        )
    else:
        weights = read_parameters(checkpoint, GPT(config, device="meta"))
        _check_finite(checkpoint, weights.items())
    tokenizer = saved("config", "data", "tokenizer", kind=str, default="")
    copied = companions(saved("config", "run", "init", kind=str, default=""), tokenizer)

    def write(target: Path) -> None:
        write_llama(config, weights, target, saved("origin", kind=dict, default={}))
        for name, source in copied.items():
            shutil.copy(source, target / name)

    _write((WEIGHTS_FILE, CONFIG_FILE), write, folder)
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    return (
        f"{config.parameter_count:,} parameters of {checkpoint} in {dtype}, written to {folder}: "
        f"{', '.join((CONFIG_FILE, WEIGHTS_FILE, *copied))}\n"
        f'load them with transformers.AutoModelForCausalLM.from_pretrained("{folder}", dtype="{dtype}"), or go on '
        f"training with --init {folder}\n{_of_tokens(tokenizer, TOKENIZER_FILE in copied)}"
    )


def _check_finite(checkpoint: Path, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise CheckpointError for a parameter that is infinite or no number."""
    for name, weight in weights:
        if not weight.isfinite().all():
            raise CheckpointError(
                f"{checkpoint}: {name} has values that are infinite or no numbers, so that the model "
                "could compute nothing: export an earlier checkpoint"
            )


def read_adapted(checkpoint: Path, state: dict[str, Any], config: GPTConfig) -> GPT:
    """Return the model of a run that trained adapters: these from the checkpoint, the rest from
    where the run began.

    Raises
    ------
    CheckpointError
        As `read_parameters`; and if the folder that the run began from cannot be read, or has other
        weights now.
    """
    saved = partial(restore.state_at, checkpoint, state)
    init, qlora = (
        saved("config", "run", "init", kind=str),
        saved("config", "run", "qlora", kind=bool),
    )
    rank = saved("config", "run", "lora", kind=int, limit=NOT_NEGATIVE) or 8 * qlora
    dtype = next(
        dtype for name, (dtype, _) in restore.names(checkpoint).items() if name.endswith(".A")
    )
    model = GPT(config, dtype=dtype, device="meta").to_empty(device="cpu")
    model.tie()
    with retold(
        CheckpointError,
        ConfigError,
        before=f"{checkpoint} has adapters alone, and the weights beside them: ",
    ):
        load_initial(Path(init), model)
    check_base(checkpoint, saved("base", kind=str), fingerprint(model), init)
    QuantizedAdapters().extend(model, Recipe(lora=rank, qlora=qlora))
    model.load_state_dict(read_parameters(checkpoint, model), strict=False)
    return model


def read_parameters(checkpoint: Path, model: GPT) -> dict[str, Tensor]:
    """Return the trained parameters of a checkpoint, each whole, under our names, in the dtype of
    the run: of several sites, which have trained apart, the mean, which is how their run ends.

    The `model` says which they are; it may be on the device `meta`.

    Raises
    ------
    CheckpointError
        If it is damaged, or not of a model of these sizes. Checksums are left to `restore.verify`.
    """
    there = restore.names(checkpoint)
    dtypes = {name: dtype for name, (dtype, _) in there.items()}
    shapes = {
        name: parameter.shape
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    found = {name: torch.empty(shape, dtype=dtypes.get(name)) for name, shape in shapes.items()}
    first, *others = sites_in(there)
    _fill(found, checkpoint, first)
    if others:
        theirs = {name: torch.empty_like(tensor) for name, tensor in found.items()}
        for site in others:
            _fill(theirs, checkpoint, site)
            for name, tensor in theirs.items():
                found[name] += tensor
        for tensor in found.values():
            tensor /= 1 + len(others)
    return found


def _fill(tensors: dict[str, Tensor], checkpoint: Path, site: str) -> None:
    """Read the whole tensors of a site."""
    pieces = [Piece(name, Extent.of(tensor.shape), tensor) for name, tensor in tensors.items()]
    restore.read(checkpoint, pieces, site)  # which names what is missing


def _write(files: tuple[str, str], write: Callable[[Path], None], folder: Path) -> None:
    """Write to a folder beside it, which takes its place as soon as it is complete."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    with _writing(folder):
        try:
            write(unfinished)
            # Some versions of safetensors make files that only their owner may read; this one is to
            # be passed on
            (unfinished / files[0]).chmod((unfinished / files[1]).stat().st_mode)
            unfinished.rename(folder)
        finally:
            # there is none any more, if all went well
            shutil.rmtree(unfinished, ignore_errors=True)


def _writing(folder: Path) -> AbstractContextManager[None]:
    before, after = f"--to {folder} cannot be written (", "): give another folder"
    return retold(CheckpointError, OSError, SafetensorError, before=before, after=after)


def companions(init: str, tokenizer: str) -> dict[str, Path]:
    """Return the files to copy beside the weights, by their names there: the tokenizer, and the
    others of `--init`.
    """
    found = {name: Path(init, name) for name in COMPANIONS} if init else {}
    if tokenizer:
        found[TOKENIZER_FILE] = Path(tokenizer)
    return {name: path for name, path in found.items() if path.is_file()}


def _of_tokens(tokenizer: str, written: bool) -> str:
    """Say how text becomes the tokens that the model knows."""
    if written:
        return f"its tokenizer is {tokenizer}, copied there as {TOKENIZER_FILE}"
    if tokenizer:
        return (
            f"its tokenizer {tokenizer} is not there any more: copy it to this folder, as "
            f"{TOKENIZER_FILE}"
        )
    return "there is no tokenizer: a token is one byte, torch.tensor([list(text.encode())])"
