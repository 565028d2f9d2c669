"""Read and write the directories in which Hugging Face keeps a Llama, with a window a Mistral, or
with experts a Mixtral: JSON and safetensors.

Only names differ (`llama_names.py`): both keep a linear map as [outputs, inputs] and rotate channel
pairs (i, i + d/2). Weights are in `model.safetensors`, or in several files that
`model.safetensors.index.json` lists. A safetensors file is a header (JSON: name, dtype, shape,
offsets), then the bytes; so names, shapes and length are checked before any weight is read.

The functions on single tensors (`read_llama`, `write_llama`) are for a program that spreads the
model over ranks.
"""

import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minidist.full.data.files import REQUIRED, FileError, at, check_regular, read_tree, retold
from minidist.full.model.config import GPTConfig
from minidist.full.model.gpt import GPT
from minidist.full.options import AT_LEAST_ONE
from minidist.full.trainer.foreign.llama_names import (
    FIXED,
    NULL,
    check_known,
    is_stack,
    kind_of,
    left_out_of,
    llama_name,
    sizes_of,
    their_names,
)

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"
COMPANIONS = (  # what a model is published with, beside its weights and their configuration
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def save_llama(model: GPT, directory: str | Path) -> None:
    """Write `model` so that `AutoModelForCausalLM.from_pretrained(directory)` reads it; dropout is
    not in the format.

    Raises
    ------
    ValueError
        If the parameters are not those of the whole serial model, or Mixtral has no such experts.
    """
    write_llama(model.config, dict(model.named_parameters()), directory)


def load_llama(
    directory: str | Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> GPT:
    """Read a Llama that Hugging Face or `save_llama` wrote.

    Parameters
    ----------
    directory : path
        Holds `config.json` and the safetensors.
    dtype, device : optional
        Dtype and device of the parameters; by default the file's dtype, and the CPU.

    Raises
    ------
    ValueError
        If a file is missing or damaged, the weights belong to another model, or the model has a
        feature that ours lacks.
    """
    config = read_llama_config(directory)
    weights = {
        name: weight.to(device or "cpu", dtype) for name, weight in read_llama(directory, config)
    }
    # no memory yet: the tensors of the file become the parameters
    model = GPT(config, device="meta")
    # a tied head has no weights of its own
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie()
    return model


def write_llama(
    config: GPTConfig,
    weights: Mapping[str, Tensor],
    directory: str | Path,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """Write whole parameters, given by our names.

    `origin` is the `config.json` that the training began with, if it began with one: its keys and
    their values are written again, such as the tokens that begin and end a text.

    Each file appears under its name only when it is complete, so a crash never leaves half a
    checkpoint behind, and a tensor mapped from the old file stays readable.
    """
    check_known(config)
    tensors = {
        theirs: part.detach().cpu().contiguous()
        for name, weight in weights.items()
        for theirs, part in zip(
            their_names(name, config), weight.unbind() if is_stack(name) else [weight], strict=True
        )
    }
    _check_weights(
        "the model to save", config, {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    )
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    save_file(tensors, target / f"{WEIGHTS_FILE}.partial", metadata={"format": "pt"})
    (target / f"{CONFIG_FILE}.partial").write_text(
        json.dumps(_llama_config(config, dtype, origin), indent=2) + "\n"
    )
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        os.replace(target / f"{name}.partial", target / name)


def read_llama(directory: str | Path, config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
    """Check all names and shapes in `directory`, then yield each parameter: our name, and the whole
    tensor.

    One tensor is in memory at a time, in the dtype of the file; a tied head, which some programs
    save, is left out if it is the embedding.
    """
    files, shapes = _read_headers(Path(directory))
    embedding, head = llama_name("embedding.weight"), llama_name("head.weight")
    saved_twice = config.tied and shapes.pop(head, None) is not None
    _check_weights(str(directory), config, shapes)
    # Version 4 of transformers would take the embedding, version 5 takes the head.
    if saved_twice and not torch.equal(
        _read_tensor(head, files[head]), _read_tensor(embedding, files[embedding])
    ):
        raise ValueError(
            f"{directory} has tie_word_embeddings=true, and yet a {head} that is not "
            f"{embedding}: say false in {CONFIG_FILE} to keep it, or leave that weight out."
        )

    def whole(name: str) -> Tensor:
        parts = [_read_tensor(theirs, files[theirs]) for theirs in their_names(name, config)]
        return torch.stack(parts) if is_stack(name) else parts[0]

    return ((name, whole(name)) for name, _ in GPT(config, device="meta").named_parameters())


def read_llama_config(directory: str | Path) -> GPTConfig:
    """Read `config.json`; what our model cannot do is refused in a sentence."""
    path = Path(directory) / CONFIG_FILE
    theirs = _read_json(path)
    said = partial(_say, path, theirs)
    if (kind := str(theirs.get("model_type"))) not in FIXED:
        _demand(path, "model_type", theirs.get("model_type"), *FIXED)
    left_out = left_out_of(kind)
    # Version 5 of transformers moved the rotary settings into a dictionary; before, only a scaled
    # variant had one, and where a file has both, that one counts.
    both: dict[str, Any] = {
        "rope_theta": said("rope_theta", kind=float, default=left_out["rope_theta"])
    }
    rotary = said("rope_scaling", kind=dict, default={}) or said(
        "rope_parameters", kind=dict, default={}
    )
    for name, supported in FIXED[kind].items():
        _demand(path, name, theirs.get(name, supported), supported)
    _demand(path, "rope_type", rotary.get("rope_type", rotary.get("type", "default")), "default")
    kinds = get_type_hints(GPTConfig)
    sizes = {}
    for ours, name in sizes_of(kind).items():
        means = left_out | NULL if name in theirs else left_out
        # We read a 0 as a default; there it would be a size.
        limit = AT_LEAST_ONE if kinds[ours] is int else None
        default = means.get(ours, REQUIRED)
        sizes[ours] = said(name, kind=kinds[ours], default=default, limit=limit)
    full, windowed = ["full_attention"], ["sliding_attention"]
    usual = windowed if sizes.get("attention_window") else full
    layers = sorted(set(map(str, said("layer_types", kind=list, default=usual))))
    _demand(path, "layer_types", layers, full, usual)
    if layers == full:
        sizes["attention_window"] = 0
    config = GPTConfig(rope_theta=_say(path, both | rotary, "rope_theta", kind=float), **sizes)
    head_dim = said("head_dim", kind=int, default=config.head_dim)
    _demand(path, "head_dim", head_dim, config.head_dim)
    return config


def read_origin(directory: str | Path) -> dict[str, Any]:
    """Return `config.json` as it stands: what is no business of ours goes with an exported model,
    too.

    Raises
    ------
    ValueError
        If it cannot be read.
    """
    return _read_json(Path(directory) / CONFIG_FILE)


def _say(path: Path, tree: Mapping[str, Any], *keys: str, **what: Any) -> Any:
    """Return a value from a file as `files.at` does; a ValueError names the file."""
    with retold(
        ValueError, FileError, before=f"{path} ", after=": it is not what a Llama comes with."
    ):
        return at(tree, *keys, **what)


def _llama_config(
    config: GPTConfig, dtype: str, origin: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Say `config` in Hugging Face's words, or in those of its `origin`, which is a model of the
    same sizes.
    """
    if origin:
        changed: dict[str, Any] = {key: dtype for key in ("dtype", "torch_dtype") if key in origin}
        unsaid = left_out_of(str(origin.get("model_type")))["sequence"]
        longest = origin.get("max_position_embeddings", unsaid)
        if config.sequence > longest:
            changed["max_position_embeddings"] = config.sequence
        return {**origin, **changed}
    kind = kind_of(config)
    sizes = {name: getattr(config, ours) for ours, name in sizes_of(kind).items()}
    if sizes.get("sliding_window") == 0:
        sizes["sliding_window"] = None
    return {
        "architectures": [f"{kind.title()}ForCausalLM"],
        "model_type": kind,
        **FIXED[kind],
        **sizes,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,  # transformers 4 reads this line, 5 the next
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "torch_dtype": dtype,
        # the tokenizer's business; Llama's own defaults would end a text at byte 2
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _demand(path: Path, name: str, value: object, *supported: object) -> None:
    """Refuse a setting that would make another model of the same weights."""
    if value not in supported:
        known = " or ".join(dict.fromkeys(map(repr, supported)))
        raise ValueError(
            f"{path} says {name}={value!r}, but this GPT can only do {known}: take another model."
        )


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or say in one sentence why not."""
    with retold(
        ValueError,
        FileError,
        before=f"{path} ",
        after=": give the directory that `save_pretrained` wrote.",
    ):
        return read_tree(path)


def _weight_files(directory: Path) -> list[Path]:
    """Find the file with all weights, or the files that the index names."""
    if (directory / WEIGHTS_FILE).is_file():
        return [directory / WEIGHTS_FILE]
    index = directory / INDEX_FILE
    if not index.is_file():
        raise ValueError(
            f"{directory} has neither {WEIGHTS_FILE} nor {INDEX_FILE}: convert weights to one "
            "first."
        )
    tree = _read_json(index)
    names = {
        _say(index, tree, "weight_map", name, kind=str)
        for name in _say(index, tree, "weight_map", kind=dict)
    }
    return [directory / name for name in sorted(names)]


def _read_headers(directory: Path) -> tuple[dict[str, Path], dict[str, tuple[int, ...]]]:
    """Return the file of each weight, and its shape, by the weights' names, without reading any."""
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(directory):
        with retold(
            ValueError,
            OSError,
            SafetensorError,
            before=f"{file} cannot be read (",
            after="): copy it again.",
        ):
            check_regular(file)
            opened: Any = safe_open(file, framework="pt")
        with opened:
            for name in opened.keys():  # noqa: SIM118 - the handle is not a dictionary
                part = opened.get_slice(name)
                # numbers mean something else
                if (dtype := part.get_dtype()) not in ("F64", "F32", "F16", "BF16"):
                    raise ValueError(
                        f"{file} has {name} as {dtype}, no float of 16 bits or more: take it "
                        "unquantised."
                    )
                files[name], shapes[name] = file, tuple(part.get_shape())
    # Early versions of transformers saved the rotary frequencies, which follow from the
    # configuration.
    return files, {
        name: shape for name, shape in shapes.items() if not name.endswith("rotary_emb.inv_freq")
    }


def _read_tensor(name: str, file: Path) -> Tensor:
    """Read one weight into memory of its own: one still mapped to the file would change with it."""
    with safe_open(file, framework="pt") as opened:
        weight: Tensor = opened.get_tensor(name)
        return weight.clone()


def _check_weights(source: str, config: GPTConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse weights of another model: name what is missing, unexpected, or of another shape."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, parameter in GPT(config, device="meta").named_parameters():
        expected |= dict.fromkeys(
            their_names(name, config), tuple(parameter.shape[is_stack(name) :])
        )
    differ = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    complaints = [
        f"{name} is {found.get(name, 'missing')}, not {expected.get(name, 'left out')}"
        for name in differ
    ]
    if complaints:
        more = f", and {len(complaints) - 3} more" if len(complaints) > 3 else ""
        other = (
            f"other weights than the configuration describes ({'; '.join(complaints[:3])}{more})"
        )
        raise ValueError(
            f"{source} holds {other}: take weights and {CONFIG_FILE} from the same model."
        )
