"""What DeepSpeed and Megatron-LM call the options of a run, and what becomes of each here: one
table for both.

    "zero_optimization": {"stage": 2, "overlap_comm": true}        --num-layers 12  --swiglu
                           │                 │                          │                 │
                     [parallel] zero      a note                 [model] layers        a note

A name that begins with dashes is a flag of Megatron's; any other is a key of DeepSpeed's, behind
its sections. They come from the page "DeepSpeed Configuration JSON" and from
`megatron/training/arguments.py`. An option that the user leaves out keeps the default of minidist,
which may differ from the other program's: heads are untied, say, and gradients are clipped. A name
that is not in the table is refused: what is not offered cannot pass unnoticed.

The table is `names.toml`. Names that mean the same share a row there; those without effect stand
under their reason.
"""

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

KINDS = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "files": tuple[str, ...],
    "pair": tuple[float, float],
}


class Row(NamedTuple):
    """One name of another program.

    Attributes
    ----------
    name, kind
        As it is written there, and the type of its value: a key of `trainer.files.WORDS`, or
        `object` for any.
    to : str
        Our section and option, such as "parallel.zero". Empty if the name has no counterpart, or
        only with others.
    choices : mapping, optional
        From their value, as a word, to ours; "" decides nothing; others are refused. Without it,
        their value is ours.
    note : str
        What the user should know: why the name has no effect here, or how its effect differs.
    """

    name: str
    kind: Any
    to: str = ""
    choices: Mapping[str, Any] | None = None
    note: str = ""


TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
DEEPSPEED_BATCH, MEGATRON_BATCH = TABLE["batches"]


def rows() -> Iterator[Row]:
    """Yield the whole table, a name a row."""
    for row in TABLE["translated"]:
        more = {key: value for key, value in row.items() if key not in ("names", "kind")}
        yield from (Row(name, KINDS[row["kind"]], **more) for name in row["names"].split())
    for why, names in TABLE["without_effect"].items():
        for name in names.split():
            kind: type = object  # of a DeepSpeed JSON
            if name.startswith("--"):
                kind = str if name.endswith("=") else bool
            yield Row(name.removesuffix("="), kind, note=why)


DEEPSPEED = [row for row in rows() if not row.name.startswith("--")]
MEGATRON = [row for row in rows() if row.name.startswith("--")]
