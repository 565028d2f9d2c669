"""A run described as for DeepSpeed: its JSON file, with `//` and `/* */` comments.

    {"train_batch_size": 32,                                [data] batch = 32
     "fp16": {"enabled": true},                      ──▶    [run] precision = "float16"
     "zero_optimization": {"stage": 2}}                     [parallel] zero = 2

What the file leaves out keeps the default of minidist: without `gradient_clipping`, `--clip` is 1 here and off there.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from minidist.trainer.config import ConfigError, Sections
from minidist.trainer.files import FileError, flatten, read_tree, retold
from minidist.trainer.foreign.names import ADAM, DEEPSPEED, DEEPSPEED_BATCH, ZERO
from minidist.trainer.foreign.options import merged, translate


def read_deepspeed(path: Path, files: Sections, flags: Sections) -> tuple[Sections, list[str]]:
    """Return our options for those in a DeepSpeed JSON, and notes on keys with no effect here, or another effect.

    train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * dp: of the three in the file any
    two will do if the ranks of the data axis are known; all three say how many ranks that has to be.

    Parameters
    ----------
    files, flags
        What our own files and flags say; of these, `dp` and `pp` in the section "parallel" are used.

    Raises
    ------
    ConfigError
        If the file cannot be read, or for a key or a value that cannot be, naming the nearest one that exists.
    """
    with retold(ConfigError, ConfigError, before=f"--deepspeed {path}: "):
        with retold(ConfigError, FileError, before="it "):
            tree = read_tree(path, lambda text: json.loads(_without_comments(text)))
            given = flatten(tree, {row.name: row.kind for row in DEEPSPEED})
        sections, notes = translate(DEEPSPEED, DEEPSPEED_BATCH, given, files, flags)
        betas, elements = given.get(f"{ADAM}betas"), given.get(f"{ZERO}reduce_bucket_size")
        if betas is not None:
            sections = merged(sections, {"optimizer": {"beta1": betas[0], "beta2": betas[1]}})
        if elements is not None:
            bytes = 2 if "precision" in sections.get("run", {}) else 4  # of an element in float16 or bfloat16, float32
            sections = merged(sections, {"parallel": {"bucket_mib": elements * bytes / (1 << 20)}})
    return sections, notes


def _without_comments(text: str) -> str:
    """Replace comments by blanks, so that lines and columns in JSON's errors stay right. Strings stay."""
    string_or_comment = r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/'

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

    return re.sub(string_or_comment, blank, text, flags=re.DOTALL)
