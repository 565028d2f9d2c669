"""From the options of another program to ours: the engine for the table in `names.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from minidist.trainer.config import ConfigError, Sections, flag
from minidist.trainer.foreign.names import Row


def translate(rows: Iterable[Row], given: dict[str, Any]) -> tuple[Sections, list[str]]:
    """Return our options for those of another program, and the notes.

    Raises
    ------
    ConfigError
        If a value is refused, or two names decide the same option differently.
    """
    sections: Sections = {}
    notes: list[str] = []
    decided: dict[str, Row] = {}
    for row in rows:
        if row.name not in given:
            continue
        value = given[row.name]
        try:
            ours = row.convert(value)
        except ValueError as error:
            words = value if isinstance(value, tuple) else () if value is True else (value,)  # as they were written
            raise ConfigError(f"{' '.join(map(str, (row.name, *words)))} cannot be: {error}") from None
        if row.note:
            notes.append(f"{row.name}: {'' if row.to else 'no effect here, '}{row.note}")
        if not row.to or ours is None:
            continue
        section, option = row.to.split(".")
        earlier = sections.setdefault(section, {}).setdefault(option, ours)
        if earlier != ours:
            other = decided[row.to].name
            raise ConfigError(f"{other} and {row.name} make {flag(option)} both {earlier} and {ours}: leave one out")
        decided[row.to] = row
    return sections, notes


def merged(*parts: Sections) -> Sections:
    """Return the options of all parts; the later wins."""
    whole: Sections = {}
    for part in parts:
        for section, options in part.items():
            whole[section] = whole.get(section, {}) | options
    return whole


def batch_sections(names: tuple[str, str, str], given: dict[str, Any], parallel: dict[str, Any]) -> Sections:
    """Solve batch = microbatch * microbatches * dp for what is missing.

    Parameters
    ----------
    names
        What the other program calls the batch of all ranks, a microbatch of one rank, and the number of microbatches;
        the last is empty if it always follows from the others.
    given
        The other program's options.
    parallel
        What is known of `ParallelOptions`; `dp` is 0 if the data axis is to take all the ranks there are.

    Raises
    ------
    ConfigError
        If the numbers contradict each other, or `dp` has to be known and is not.
    """
    batch, micro, count = (given.get(name) for name in names)
    dp = parallel["dp"]
    if micro is not None:
        count = count or (1 if batch is None else None)  # who states no batch does not accumulate either
        if not dp and (batch is None or count is None):
            open = "the batch of all ranks" if batch is None else f"the number of microbatches in {names[0]} {batch}"
            raise ConfigError(
                f"{names[1]} {micro} leaves {open} open without the ranks of the data axis: add --dp RANKS"
            )
        factors = {names[1]: micro, names[2]: count, "--dp": dp}
        product = micro * (count or 1) * (dp or 1)
        batch = batch or product
        if batch % product or (count and dp and batch != product):
            words = " * ".join(f"{name} {value}" for name, value in factors.items() if name and value)
            complete = "is not" if count and dp else "is no multiple of"
            raise ConfigError(f"{names[0]} {batch} {complete} {words} = {product}: change one of them")
        count, dp = count or batch // product, dp or batch // product
    counted = "microbatches" if parallel["pp"] > 1 else "accumulate"
    found: Sections = {"data": {"batch": batch}, "parallel": {counted: count, "dp": dp}}
    return {name: {key: value for key, value in options.items() if value} for name, options in found.items()}
