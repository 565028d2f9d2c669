"""Files that others have written, read in one place: JSON and TOML, checked before anybody looks at a value.

    missing ─ no regular file ─ too large ─ not UTF-8 ─ not JSON ─ nested too deeply ─ numbers that cannot be

Whatever is wrong is a `FileError`, whose message is the end of a sentence: the reader names the file in front of it.
A pipe in place of a file is found without opening it, which would wait for a writer for ever.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minidist.comm.job import number
from minidist.comm.job.number import Limit, read_number, shown

LARGEST = 1 << 30  # bytes of a file that is read as a whole
DEEPEST = 64  # sections within sections
REQUIRED = object()

WORDS: dict[Any, str] = {  # what a value must be, for messages; the keys are all the types that values have
    **number.WORDS,
    str: "a string",
    bool: "true or false",
    tuple[str, ...]: "a list of strings",
    tuple[int, ...]: "a list of whole numbers",
    tuple[float, float]: "a list of two numbers",
    tuple[int, int]: "a list of two whole numbers",
    list: "a list",
    dict: "a section {...}",
}


class FileError(ValueError):
    """A file that cannot be used; the message goes on after its name, such as `is not JSON: ...`."""


def check_regular(path: Path) -> None:
    """Raise OSError unless there is a regular file, without opening it."""
    try:
        mode = path.stat().st_mode
    except ValueError:  # a character that no name has
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL)) from None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "no regular file")


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file; OSError if there is none, or it cannot be read."""
    check_regular(path)
    return path.read_bytes()


def read_text(path: Path) -> str:
    """Return the text of a file; FileError if it cannot be read, is too large, or is not UTF-8."""
    try:
        check_regular(path)
        if (size := path.stat().st_size) > LARGEST:
            raise FileError(f"is too large: {size:,} bytes, and at most {LARGEST:,} are read")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise FileError(f"is not text: byte {error.start} is {error.object[error.start]:#x}") from None


def read_tree(path: Path, loads: Callable[[str], Any] = json.loads, form: str = "JSON") -> dict[str, Any]:
    """Return the sections and values in a file; FileError if it cannot be read, or is not of this form."""
    return parse_tree(read_text(path), loads, form)


def parse_tree(text: str, loads: Callable[[str], Any] = json.loads, form: str = "JSON") -> dict[str, Any]:
    """Return the sections and values in a text; see `read_tree`."""
    try:
        tree = loads(text)
    except RecursionError:
        raise FileError(f"is not {form}: it is nested too deeply") from None
    except FileError:
        raise
    except ValueError as error:
        raise FileError(f"is not {form}: {error}") from None
    if not isinstance(tree, dict):
        raise FileError(f"must be {WORDS[dict]}")
    _check_values(tree)
    return tree


def _check_values(tree: dict[str, Any]) -> None:
    """Refuse numbers that are none or too large, and what is nested deeper than anybody writes."""
    level: list[tuple[str, Any]] = [("", tree)]
    for _ in range(DEEPEST):
        inner: list[tuple[str, Any]] = []
        for name, node in level:
            if isinstance(node, dict | list):
                items = node.items() if isinstance(node, dict) else enumerate(node)
                inner += [(f"{name}.{key}" if name else str(key), value) for key, value in items]
            elif type(node) in (int, float):
                try:
                    read_number(node, type(node))
                except ValueError as error:
                    raise FileError(f"has {name} = {shown(node)}, which {error}") from None
        level = inner
        if not level:
            return
    raise FileError(f"is nested more than {DEEPEST} deep at {level[0][0][:20]}")


def typed(value: Any, kind: Any, limit: Limit | None = None) -> Any:
    """Return a value of a file as this kind, a key of `WORDS`: whole numbers may stand for numbers.

    Raises
    ------
    ValueError
        If it is of another; the message says what it must be.
    """
    if kind in (int, float):
        return read_number(None if isinstance(value, str) else value, kind, limit)
    if kind in (str, bool, list, dict):
        if type(value) is kind:
            return value
        raise ValueError(f"must be {WORDS[kind]}")
    entry, *more = kind.__args__
    try:
        if not isinstance(value, list) or (... not in more and len(value) != 1 + len(more)):
            raise ValueError
        return tuple(typed(element, entry) for element in value)
    except ValueError:
        raise ValueError(f"must be {WORDS[kind]}") from None


def at(tree: Any, *keys: str, kind: Any, default: Any = REQUIRED, limit: Limit | None = None) -> Any:
    """Return the value at `keys`, one section inside the other, as this kind; `default` if nothing or null is there.

    Raises
    ------
    FileError
        If it is of another kind, or not there and has no default.
    """
    for depth, key in enumerate(keys):
        if not isinstance(tree, dict):
            raise FileError(f"has {'.'.join(keys[:depth])} = {shown(tree)}, which must be {WORDS[dict]}")
        tree = tree.get(key)
        if tree is None and default is not REQUIRED:
            return default
        if tree is None:
            raise FileError(f"does not say {'.'.join(keys[: depth + 1])}")
    try:
        return typed(tree, kind, limit)
    except ValueError as error:
        raise FileError(f"has {'.'.join(keys)} = {shown(tree)}, which {error}") from None
