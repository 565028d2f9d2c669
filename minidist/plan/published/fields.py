"""The fields that a published row may have: `[row]` and `[config]` of `ranges.toml` list them.

A row is left out if it has any other field, or a value outside its range. So whoever adds a field to
the published rows has to say there whether predictions read it. Otherwise a mixture would be predicted
as a dense model.
"""

from typing import Any

from minidist.full.data.files import FileError, at, check_values, retold, typed
from minidist.full.options import shown
from minidist.plan.device import Ranges, ranges

PublishedRow = dict[str, Any]
"""One published measurement as JSON has it: id, source, kind, config and measured."""

OR_WORDS = ("zero", "virtual_pp")  # a row may describe these in place of a number


class LeftOut(ValueError):
    """A row that cannot be predicted; the message says why."""


def check_row(row: Any) -> None:
    """Raise LeftOut unless a row has the fields of a row, each of its kind."""
    if not isinstance(row, dict):
        raise LeftOut(f"{shown(row)} is not a row with id, source, kind, config and measured")
    with retold(LeftOut, FileError, before="it "):
        check_values(row)
    for name in ("id", "measured"):
        if row.get(name) is None:
            raise LeftOut(f"it has no {name}")
    known_fields(row, ranges("row"))


def read_config(config: PublishedRow) -> PublishedRow:
    """Return a configuration with every number of its kind.

    Raise LeftOut for what predictions do not know.
    """
    return known_fields(config, ranges("config"))


def known_fields(tree: PublishedRow, known: Ranges) -> PublishedRow:
    """Return the fields of a tree, each of its kind; 1.0, which JSON may have for a whole number, as
    1.
    """
    found: PublishedRow = {}
    for name, value in tree.items():
        if name not in known:
            raise LeftOut(f"it has {name}, a field that no prediction reads")
        kind, limit = known[name]
        in_words = name in OR_WORDS and isinstance(value, str)
        if value is not None and kind is not object and not in_words:
            if kind is int and type(value) is float and value.is_integer():
                value = int(value)
            with retold(LeftOut, ValueError, before=f"it has {name} = {shown(value)}, which "):
                value = typed(value, kind, limit)
        found[name] = value
    return found


def text(config: PublishedRow, *names: str) -> str:
    """Return what a configuration says under these names, in small letters."""
    return " ".join(str(config.get(name) or "") for name in names).lower()


def positive(values: PublishedRow, name: str) -> float:
    """Return a number that was measured, or 0.0 if there is none.

    Raise LeftOut for any other value.
    """
    with retold(LeftOut, FileError, before="it "):
        kind, limit = ranges("result")["number"]
        return float(at(values, name, kind=kind, limit=limit, default=0.0))
