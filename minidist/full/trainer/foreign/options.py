"""From the options of another program to ours: the engine for the table in `names.py`.

    python -m minidist train --megatron --tensor-model-parallel-size 2 --num-layers 12
    --global-batch-size 64 --dp 4

Megatron's flags stand beside our own; `--lr`, `--weight-decay`, `--seed` and `--save` are written
alike in both. DeepSpeed's are in a JSON file, with `//` and `/* */` comments:

    {"train_batch_size": 32,                                [data] batch = 32
     "fp16": {"enabled": true},                      ──▶    [run] precision = "float16"
     "zero_optimization": {"stage": 2}}                     [parallel] zero = 2

What is left out keeps the default of minidist: without `gradient_clipping`, `--clip` is 1 here and
off there.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from minidist.full.data.files import FileError, flatten, read_tree, retold
from minidist.full.launch.parser import flag
from minidist.full.trainer.config import Config, ConfigError, Sections
from minidist.full.trainer.foreign.names import DEEPSPEED, DEEPSPEED_BATCH, Row


def translate(
    rows: Iterable[Row],
    batch: Sequence[str],
    given: dict[str, Any],
    files: Sections,
    flags: Sections,
) -> tuple[Sections, list[str]]:
    """Return our options for those of another program, and notes on those with no effect here, or
    another effect.

    Parameters
    ----------
    rows, batch
        What the other program calls its options; see `names.py`.
    given
        Their values, by name.
    files, flags
        What our own files say, which these options overrule, and our own flags, which overrule
        these.

    Raises
    ------
    ConfigError
        If a value is refused, if two names decide the same option differently, or if the batch is
        left open.
    """
    sections: Sections = {}
    notes: list[str] = []
    decided: dict[str, Row] = {}
    for row in (row for row in rows if row.name in given):
        ours = value = given[row.name]
        if row.choices is not None:
            ours = row.choices.get(str(value).lower())
            if ours is None:
                raise ConfigError(
                    f"{row.name} {value} cannot be: it must be one of {', '.join(row.choices)}"
                )
        if row.note:
            notes.append(f"{row.name}: {'' if row.to else 'no effect here, '}{row.note}")
        if not row.to or (row.choices and ours == ""):
            continue
        section, option = row.to.split(".")
        earlier = sections.setdefault(section, {}).setdefault(option, ours)
        if earlier != ours:
            other = decided[row.to].name
            raise ConfigError(
                f"{other} and {row.name} make {flag(option)} both {earlier} and {ours}: leave one "
                "out"
            )
        decided[row.to] = row
    whole = merged(Config().sections(), files, sections, flags)
    return merged(sections, _batch_sections(batch, given, whole["parallel"])), notes


def read_deepspeed(path: Path, files: Sections, flags: Sections) -> tuple[Sections, list[str]]:
    """Return our options for those in a DeepSpeed JSON, and notes on keys with no effect here, or
    another effect.

    train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * dp: of the
    three in the file any two will do if the ranks of the data axis are known; all three say how
    many ranks that has to be.

    Parameters
    ----------
    files, flags
        What our own files and flags say; of these, `dp` and `pp` in the section "parallel" are
        used.

    Raises
    ------
    ConfigError
        If the file cannot be read, or for a key or a value that cannot be, naming the nearest one
        that exists.
    """
    with retold(ConfigError, ConfigError, before=f"--deepspeed {path}: "):
        with retold(ConfigError, FileError, before="it "):
            tree = read_tree(path, lambda text: json.loads(_without_comments(text)))
            given = flatten(tree, {row.name: row.kind for row in DEEPSPEED})
        sections, notes = translate(DEEPSPEED, DEEPSPEED_BATCH, given, files, flags)
        betas, elements = (
            given.get("optimizer.params.betas"),
            given.get("zero_optimization.reduce_bucket_size"),
        )
        if betas is not None:
            sections = merged(sections, {"optimizer": {"beta1": betas[0], "beta2": betas[1]}})
        if elements is not None:
            # of an element in float16 or bfloat16, float32
            bytes = 2 if "precision" in sections.get("run", {}) else 4
            sections = merged(sections, {"parallel": {"bucket_mib": elements * bytes / (1 << 20)}})
    return sections, notes


def merged(*parts: Sections) -> Sections:
    """Return the options of all parts; the later wins."""
    whole: Sections = {}
    for part in parts:
        for section, options in part.items():
            whole[section] = whole.get(section, {}) | options
    return whole


def _batch_sections(
    names: Sequence[str], given: dict[str, Any], parallel: dict[str, Any]
) -> Sections:
    """Solve batch = microbatch * microbatches * dp for what is missing; `dp` is 0 if it takes all
    ranks there are.
    """
    batch, micro, count = (given.get(name) for name in names)
    dp = parallel["dp"]
    for name in names:
        if given.get(name, 1) < 1:
            raise ConfigError(f"{name} {given[name]} cannot be: it must be at least 1")
    if micro is not None:
        # who states no batch does not accumulate either
        count = count or (1 if batch is None else None)
        if not dp and (batch is None or count is None):
            raise ConfigError(
                f"{names[1]} {micro} needs the number of ranks of the data axis: add --dp RANKS"
            )
        product = micro * (count or 1) * (dp or 1)
        batch = batch or product
        if batch % product or (count and dp and batch != product):
            product_of = f"{names[1]} {micro} * {count or 'N'} microbatches * --dp {dp or 'N'}"
            raise ConfigError(f"{names[0]} {batch} is not {product_of}: change one of them")
        count, dp = count or batch // product, dp or batch // product
    counted = "microbatches" if parallel["pp"] > 1 else "accumulate"
    spread = {counted: count, "dp": dp}
    return {
        "data": {"batch": batch} if batch else {},
        "parallel": {name: value for name, value in spread.items() if value},
    }


def _without_comments(text: str) -> str:
    """Replace comments by blanks, so that lines and columns in JSON's errors stay right. Strings
    stay.
    """
    string_or_comment = r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/'
    return re.sub(
        string_or_comment,
        lambda found: found[1] or re.sub(r"[^\n]", " ", found[0]),
        text,
        flags=re.DOTALL,
    )
