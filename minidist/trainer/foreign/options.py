"""What other programs call the options of a run: one row for each of their names, and what becomes of it here.

    "zero_optimization": {"stage": 2, "overlap_comm": true}        --num-layers 12  --log-interval 10
                           │                 │                          │                 │
                     [parallel] zero      a note                 [model] layers        a note

`deepspeed` and `megatron` each hold such a table. What is not written there keeps the default of minidist, which may
not be that of the other program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from minidist.trainer.config import ConfigError, Sections, flag


def as_it_is(value: Any) -> Any:
    """Translate a value that means the same here."""
    return value


@dataclass(frozen=True)
class Row:
    """One name of another program.

    Attributes
    ----------
    name, kind
        As it is written there, and the type of its value: a key of `files.WORDS`.
    to : str
        Our section and option, such as "parallel.zero". Empty if the name has no counterpart, or only with others.
    convert
        From their value to ours, None to decide nothing. A ValueError refuses the value, and says what it must be.
    note : str
        What the user should know: why the name has no effect here, or how its effect differs.
    """

    name: str
    kind: Any
    to: str = ""
    convert: Callable[[Any], Any] = as_it_is
    note: str = ""


def unused(why: str, kind: Any, *names: str) -> list[Row]:
    """Return rows of names that have no effect here."""
    return [Row(name, kind, note=why) for name in names]


def refused(why: str, kind: Any, *names: str) -> list[Row]:
    """Return rows of names that would change the result and have no counterpart; as a section, one that is off may."""

    def refuse(value: Any) -> None:
        if not (isinstance(value, dict) and value.get("enabled") is False):
            raise ValueError(why)

    return [Row(name, kind, convert=refuse, note=why) for name in names]


def only(why: str, *choices: Any) -> Callable[[Any], None]:
    """Return a conversion that refuses all but some values, which are what happens here anyway."""

    def check(value: Any) -> None:
        if (value.lower() if isinstance(value, str) else value) not in choices:
            raise ValueError(why)

    return check


def if_on(ours: Any) -> Callable[[bool], Any]:
    """Return the conversion of a switch that, when on, stands for a value of ours."""
    return lambda on: ours if on else None


def among(choices: dict[str, Any]) -> Callable[[str], Any]:
    """Return a conversion by a table, which refuses other words."""

    def choose(word: str) -> Any:
        if word not in choices:
            raise ValueError(f"it must be one of {', '.join(choices)}")
        return choices[word]

    return choose


def at_least_one(value: int) -> int:
    """Refuse a count that cannot be."""
    if value < 1:
        raise ValueError("it must be at least 1")
    return value


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
