"""A run described as for DeepSpeed: its JSON file, with `//` and `/* */` comments.

    {"train_batch_size": 32,                                [data] batch = 32
     "fp16": {"enabled": true},                      ──▶    [run] precision = "float16"
     "zero_optimization": {"stage": 2}}                     [parallel] zero = 2

What the file leaves out keeps the default of minidist: without `gradient_clipping`, `--clip` is 1 here and off there.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

from minidist.trainer.config import Config, ConfigError, Sections
from minidist.trainer.files import FileError, read_tree, retold, typed
from minidist.trainer.foreign.names import ADAM, DEEPSPEED, DEEPSPEED_BATCH, STATE, ZERO
from minidist.trainer.foreign.options import batch_sections, merged, translate


def read_deepspeed(path: Path, known: Sections | None = None) -> tuple[Sections, list[str]]:
    """Return our options for those in a DeepSpeed JSON, and notes on keys with no effect here, or another effect.

    train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * dp: of the three in the file any
    two will do if `known` has the ranks of the data axis; all three say how many ranks that has to be.

    Parameters
    ----------
    known
        Options from elsewhere; of these, `dp` and `pp` in the section "parallel" are used.

    Raises
    ------
    ConfigError
        If the file cannot be read, or for a key or a value that cannot be, naming the nearest one that exists.
    """
    with retold(ConfigError, ConfigError, before=f"--deepspeed {path}: "):
        given = _flatten(_load(path))
        sections, notes = translate(DEEPSPEED, given)
        parallel = merged(Config().sections(), known or {})["parallel"]
        sections = merged(sections, batch_sections(DEEPSPEED_BATCH, given, parallel))
        betas, elements = given.get(f"{ADAM}betas"), given.get(f"{ZERO}reduce_bucket_size")
        if betas is not None:
            sections = merged(sections, {"optimizer": {"beta1": betas[0], "beta2": betas[1]}})
        if elements is not None:
            bytes = 2 if "precision" in sections.get("run", {}) else 4  # of an element in float16 or bfloat16, float32
            sections = merged(sections, {"parallel": {"bucket_mib": elements * bytes / (1 << 20)}})
        folder = given.get(f"{STATE}nvme_path")
        if folder is not None and sections.get("memory", {}).get("offload") == "disk":
            sections = merged(sections, {"memory": {"offload_folder": folder}})
        elif folder is not None:
            notes.append(f"{STATE}nvme_path: no effect here, the state goes to a disk only if device is nvme")
    return sections, notes


# ---------------------------------------------------------------- the file


def _load(path: Path) -> dict[str, Any]:
    with retold(ConfigError, FileError, before="it "):
        return read_tree(path, lambda text: json.loads(_without_comments(text), object_pairs_hook=_once))


def _without_comments(text: str) -> str:
    """Replace comments by blanks, so that lines and columns in JSON's errors stay right. Strings stay."""
    string_or_comment = r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/'

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

    return re.sub(string_or_comment, blank, text, flags=re.DOTALL)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise FileError(f"has {twice[0]} twice in one section: leave one out")
    return dict(pairs)


def _flatten(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values by dotted name; refuse names that DeepSpeed does not have, and values of another type."""
    kinds = {row.name: row.kind for row in DEEPSPEED}
    flat: dict[str, Any] = {}
    for key, value in options.items():
        name = prefix + key
        inner = any(known.startswith(f"{name}.") for known in kinds)
        if name not in kinds and not inner:
            raise ConfigError(f"there is no key {name}: {_nearest(name, list(kinds))}")
        if value == "auto":
            raise ConfigError(f'{name} is "auto", which only Hugging Face\'s Trainer fills in: write its value')
        if value is None:  # as if it were left out
            continue
        kind = dict if inner else kinds[name]
        with retold(ConfigError, ValueError, before=f"{name} = {json.dumps(value)[:60]} "):
            whole = kind is int and type(value) is float and value.is_integer()  # such as sizes of 5e8
            value = value if kind is object else typed(int(value) if whole else value, kind)
        flat |= _flatten(value, f"{name}.") if inner else {name: value}
    return flat


def _nearest(name: str, known: list[str]) -> str:
    """Name the key that was meant: misspelt, or in the wrong section."""
    known = list(dict.fromkeys(".".join(name.split(".")[:end]) for name in known for end in range(1, 5)))
    last = name.rpartition(".")[2]
    elsewhere = {full.rpartition(".")[2]: full for full in reversed(known)}
    near = [elsewhere[last]] if last in elsewhere else difflib.get_close_matches(name, known, n=1)
    near = near or [elsewhere[other] for other in difflib.get_close_matches(last, elsewhere, n=1)]
    return f"did you mean {near[0]}?" if near else "leave it out, or see DeepSpeed's documentation"
