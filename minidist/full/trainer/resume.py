"""Where a run starts: from a checkpoint, from somebody's Llama, or from random weights. It is
checked before any work.

--resume   the checkpoint's weights and optimizer, its step, and its place in the text
--init     the weights in a folder, with its sizes, its tokenizer, its rotary base and its epsilon of the norms
neither    weights drawn from --seed
"""

import hashlib
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from minidist.full.checkpoint import restore, store
from minidist.full.checkpoint.store import CheckpointError
from minidist.full.comm import Communicator
from minidist.full.data.files import FileError, read_tree, retold
from minidist.full.launch.parser import flag
from minidist.full.model import GPT, GPTConfig
from minidist.full.options import NOT_NEGATIVE, POSITIVE, flags_of
from minidist.full.precision.mixed import LossScaler
from minidist.full.trainer.batches import Batches
from minidist.full.trainer.config import Config, ConfigError, Sections, precision_of
from minidist.full.trainer.foreign.llama import (
    TOKENIZER_FILE,
    read_llama,
    read_llama_config,
    read_origin,
)

CHANGEABLE = ("dropout", "capacity", "balance", "balance_rate", "z_loss")
"""What may change of a model while it is trained: no shape depends on it."""

SIZES = ["layers", "hidden", "heads", "key_value_heads", "intermediate"]
EXPERTS = ["experts", "top_k", "shared_experts", "scores", "raw_weights"]


class Resumed(NamedTuple):
    """Where a run continues: after `step` steps, with the tensors of the checkpoint `path`."""

    path: Path
    step: int
    changed: list[str]  # options that affect the numbers and have changed since


def prepare(
    config: Config,
    model: GPT,
    base: str,
    batches: Batches,
    scaler: LossScaler | None,
    comm: Communicator,
) -> Resumed:
    """Find the newest checkpoint, check that it can be continued, and set position and loss scale.
    Sends nothing.

    The `model`, which may be on `meta`, has the run's adapters, if any; `base` is the digest of
    what they stand beside. Each rank compares its share of the checksums, so the caller has to tell
    the other ranks of an error.

    Raises
    ------
    CheckpointError
        If there is none, or it is damaged, or it belongs to another model, another text, or a
        longer run.
    """
    path = store.newest(Path(config.run.save))
    restore.verify(path, slice(comm.rank, None, comm.size))
    saved = partial(restore.state_at, path, restore.read_state(path))
    _check_beginning(path, saved("config", "run", "init", kind=str, default=""), config.run.init)
    _check_parameters(path, model)
    check_base(path, saved("base", kind=str, default=""), base, config.run.init)
    sizes = saved("model", kind=dict)
    for name, now in asdict(model.config).items():
        # an option that is newer than the run
        before = sizes.get(name, getattr(GPTConfig, name, None))
        if name not in CHANGEABLE and before != now:
            raise restore.other_model(path, name, before, now)
    place = {
        name: saved("batches", name, kind=int, limit=NOT_NEGATIVE)
        for name in ("checksum", "epoch", "position")
    }
    with retold(CheckpointError, ValueError, before=f"{path} cannot be continued: "):
        batches.load_state_dict(saved("batches", kind=dict) | place)
    step = saved("step", kind=int, limit=NOT_NEGATIVE)
    if step != store.step_of(path):
        name = store.final_of(path.parent, step).name
        raise CheckpointError(
            f"{path} was written after step {step}, and would hide newer ones: rename it {name}"
        )
    if step > config.run.steps:
        longer = f"{path} has {step} steps behind it, more than --steps {config.run.steps}"
        raise CheckpointError(f"{longer}: use --steps {step} to look at it, or more to train on")
    if scaler is not None and saved("scaler", kind=dict, default=None):
        scale = saved("scaler", "scale", kind=float, limit=POSITIVE)
        scaler.load_state_dict(
            {"scale": scale, "good_steps": saved("scaler", "good_steps", kind=int)}
        )
    before = {
        section: saved("config", section, kind=dict)
        for section in ("model", "data", "run", "optimizer")
    }
    before["parallel"] = saved("config", "parallel", kind=dict, default={})
    sites = before["parallel"].get("dcn", 1)
    if sites != config.parallel.dcn:
        raise CheckpointError(
            f"{path} has the parameters of {sites} sites, which have trained apart, not of "
            f"{config.parallel.dcn}: use --dcn {sites}"
        )
    updated = before["optimizer"].get("optimizer", "adamw")
    if updated != config.optimizer.optimizer:
        raise CheckpointError(
            f"{path} has the state of another optimizer, and {config.optimizer.optimizer} cannot go "
            f"on from its moments: use --optimizer {updated}"
        )
    return Resumed(path, step, changed_options(before, config))


def _check_beginning(path: Path, before: str, now: str) -> None:
    """Refuse `--init` where the run began from random weights, and the other way round; the folder
    may have moved.
    """
    if before and not now:
        raise CheckpointError(
            f"{path} began from the weights in {before}: add --init {before}, or where it is now"
        )
    if now and not before:
        raise CheckpointError(
            f"{path} began from random weights, not from --init {now}: leave --init out"
        )


def _check_parameters(path: Path, model: GPT) -> None:
    there = {
        name: restore.words(*tensor)
        for name, tensor in restore.names(path).items()
        if "/" not in name
    }
    trained = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    here = {name: restore.words(parameter.dtype, parameter.shape) for name, parameter in trained}
    for name in sorted(there | here):
        if there.get(name) != here.get(name):
            raise restore.other_model(
                path, name, there.get(name, "missing"), here.get(name, "missing")
            )


def fingerprint(model: nn.Module) -> str:
    """Return a digest of all parameters' bits: ranks that hold the same model have the same."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_base(path: Path, before: str, now: str, init: str) -> None:
    """Raise CheckpointError if adapters were trained beside other weights than those of `--init`,
    by their digests.
    """
    if before != now:
        raise CheckpointError(
            f"{path} has adapters for other weights than {init} has now: bring that folder back"
        )


def changed_options(before: Sections, config: Config) -> list[str]:
    """Return, in words, the options that affect the numbers of a run and have changed."""
    now = config.sections()
    spread = flags_of(config.parallel)
    inexact = {option.name for option in spread if not option.metadata["exact"]}
    names = [
        *(("model", name) for name in CHANGEABLE),
        ("data", "batch"),
        ("run", "steps"),
        ("run", "precision"),
    ]
    for option in spread:  # also those that say more of one that is inexact
        needs = option.metadata["needs"]
        if option.name in inexact or (needs is not None and needs.option in inexact):
            names.append(("parallel", option.name))
    names += [("optimizer", name) for name in now["optimizer"]]
    if config.parallel.chooses:  # what is sent depends on what a rank has
        cut = ("tp", "ep", "pp", "zero")
        sliced = ("dp", "cp") if now["parallel"]["zero"] else ()
        names += [("parallel", name) for name in cut + sliced]
    before, now = _with_precision(before), _with_precision(now)
    # none newer than the run
    known = [(section, name) for section, name in names if name in before[section]]
    old_and_new = [(name, before[section][name], now[section][name]) for section, name in known]
    return [
        f"{name} {'none' if old == '' else old} -> {'none' if new == '' else new}"
        for name, old, new in old_and_new
        if old != new
    ]


def _with_precision(sections: Sections) -> Sections:
    """Return options with the precision that they come to, if none is said."""
    run = sections["run"]
    precision = precision_of(run.get("precision", ""), run.get("verify", False))
    return sections | {"run": run | {"precision": precision}}


# ---------------------------------------------------------------- somebody's Llama


def sizes_of(config: Config, vocabulary: int) -> GPTConfig:
    """Return the sizes of the model to train. With `--init`, its folder decides what is not an
    option.

    The vocabulary may then be larger than the tokenizer's: published models pad it.

    Raises
    ------
    ConfigError
        If the folder cannot be read, or holds a model of other sizes.
    """
    asked = config.gpt(vocabulary)
    if not config.run.init:
        return asked
    folder = Path(config.run.init)
    theirs = _read_sizes(folder)
    if (here := _flags(asked)) != (there := _flags(theirs)):
        raise ConfigError(
            f"--init {folder} is another model than {here}: leave sizes out, or use {there}"
        )
    if vocabulary > theirs.vocabulary or (
        vocabulary < theirs.vocabulary and not config.data.tokenizer
    ):
        tokenizer = config.data.tokenizer or "one token a byte"
        here = (
            f"the tokenizer here ({tokenizer}) has {vocabulary}: give the model's own, "
            "--tokenizer FILE"
        )
        raise ConfigError(f"--init {folder} has {theirs.vocabulary} tokens, and {here}")
    return replace(
        theirs, sequence=asked.sequence, **{name: getattr(asked, name) for name in CHANGEABLE}
    )


def with_folder(sections: Sections) -> Sections:
    """Return the options of a run, with those of its `--init` folder where nothing else was said.

    The folder says the sizes of the model, and has the tokenizer.

    Raises
    ------
    ConfigError
        If the folder cannot be read, or an option says other sizes, or `--tokenizer` numbers tokens
        in another way than the folder's own.
    """
    folder = Path(sections.get("run", {}).get("init", ""))
    if folder == Path():
        return sections
    theirs, own = _read_sizes(folder), folder / TOKENIZER_FILE
    names = [*SIZES, "attention_window", "tied", *(EXPERTS if theirs.experts else ["experts"])]
    model: dict[str, Any] = {name: getattr(theirs, name) for name in names}
    asked, data = sections.get("model", {}), sections.get("data", {})
    # A 0 stands for a number that follows from the others: whether it is the folder's, `sizes_of`
    # finds out.
    derived = ("key_value_heads", "intermediate")
    given = {
        name: value
        for name, value in asked.items()
        if name in model and (value or name not in derived)
    }
    other = [_as_flag(name, value) for name, value in given.items() if value != model[name]]
    if other:
        fix = f"leave sizes out, or use {_flags(theirs)}"
        raise ConfigError(f"--init {folder} is another model than {' '.join(other)}: {fix}")
    if own.is_file():
        data = {"tokenizer": str(own)} | data
        if _numbering(here := Path(data["tokenizer"])) != _numbering(own):
            trained = (
                f"numbers tokens in another way than {own}, for which the weights were trained"
            )
            raise ConfigError(f"--tokenizer {here} {trained}: leave --tokenizer out")
    return sections | {"model": model | asked, "data": data}


def origin_of(config: Config) -> dict[str, Any]:
    """Return the `config.json` of the `--init` folder, which an export writes again; nothing
    without `--init`.
    """
    if not config.run.init:
        return {}
    with retold(ConfigError, ValueError, before=f"--init {config.run.init}: "):
        return read_origin(config.run.init)


def _read_sizes(folder: Path) -> GPTConfig:
    if store.complete(folder):
        raise ConfigError(
            f"--init {folder} has checkpoints: run python -m minidist export {folder} --to FOLDER "
            "first"
        )
    with retold(ConfigError, OSError, ValueError, before=f"--init {folder}: "):
        return read_llama_config(folder)


def _numbering(tokenizer: Path) -> object:
    """Return what decides which tokens have which numbers; None for a file that `text.py` will
    refuse.
    """
    try:
        tree = read_tree(tokenizer)
    except FileError:
        return None
    return tree.get("model"), tree.get("added_tokens")


def load_initial(folder: Path, model: GPT) -> None:
    """Fill a model with the weights of a Llama's folder, whatever their dtype; one is in memory at
    a time.

    Raises
    ------
    ConfigError
        If the folder cannot be read, or its weights are not exactly these.
    """
    with retold(ConfigError, OSError, ValueError, before=f"--init {folder}: "):
        model.fill(read_llama(folder, model.config))


def _flags(sizes: GPTConfig) -> str:
    names = SIZES + ["attention_window"] * bool(sizes.attention_window)
    names += EXPERTS if sizes.experts else []
    return " ".join(_as_flag(name, getattr(sizes, name)) for name in [*names, "tied"])


def _as_flag(name: str, value: object) -> str:
    """Return how an option is written on the command line, with its value."""
    if isinstance(value, bool):
        return flag(name if value else f"no_{name}")
    return f"{flag(name)} {value}"
