"""Files from elsewhere, JSON and TOML, are read in one place, which checks them before any value is
used.

    missing ─ no regular file ─ too large ─ not UTF-8 ─ not JSON ─ nested too deeply ─ impossible numbers

Every fault is a `FileError`. Its message ends a sentence: the caller puts the file's name in front.
A pipe is refused without opening it, because opening would wait for a writer.
"""

import difflib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minidist.full.options import NUMBERS, Limit, read_number, shown

LARGEST = 1 << 30  # bytes of a file that is read whole
DEEPEST = 64  # sections within sections
REQUIRED = object()

WORDS: dict[Any, str] = {  # the types that values may have, and their names in messages
    **NUMBERS,
    str: "a string without null characters",
    bool: "true or false",
    tuple[str, ...]: "a list of strings",
    tuple[int, ...]: "a list of whole numbers",
    tuple[float, float]: "a list of two numbers",
    tuple[int, int]: "a list of two whole numbers",
    list: "a list",
    dict: "a section {...}",
}


class FileError(ValueError):
    """A file cannot be used.

    The message continues after the file's name, such as `is not JSON: ...`.
    """


def reason(error: Exception) -> str:
    """Return what went wrong, in the words of the file system if it was the one to say so."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


@contextmanager
def retold(
    kind: type[Exception],
    *faults: type[Exception],
    before: str = "",
    after: str = "",
    words: Callable[[str], str] = str,
) -> Iterator[None]:
    """Raise faults of the `with` block as a `kind`, whose sentence says which option or file is
    meant.

    `words` puts what the fault says into the words of whoever reads it.
    """
    try:
        yield
    except faults as error:
        raise kind(f"{before}{words(reason(error))}{after}") from None


def check_regular(path: Path) -> None:
    """Raise OSError unless `path` is a regular file, without opening it."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(
            errno.EINVAL, os.strerror(errno.EISDIR) if path.is_dir() else "no regular file"
        )


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raise FileError if it cannot be read, is too large, or is not UTF-8.
    """
    try:
        check_regular(path)
        if (size := path.stat().st_size) > LARGEST:
            raise FileError(f"is too large: {size:,} bytes, and at most {LARGEST:,} are read")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise FileError(
            f"is not text: byte {error.start} is {error.object[error.start]:#x}"
        ) from None


def read_tree(
    path: Path, loads: Callable[[str], Any] = json.loads, form: str = "JSON"
) -> dict[str, Any]:
    """Return the sections and values in a file.

    Raise FileError if it cannot be read, or is not of this form.
    """
    return parse_tree(read_text(path), loads, form)


def parse_tree(
    text: str, loads: Callable[[str], Any] = json.loads, form: str = "JSON"
) -> dict[str, Any]:
    """Return the sections and values in a text; see `read_tree`."""
    tree = parse(text, loads, form)
    if not isinstance(tree, dict):
        raise FileError(f"must be {WORDS[dict]}")
    check_values(tree)
    return tree


def parse(text: str, loads: Callable[[str], Any] = json.loads, form: str = "JSON") -> Any:
    """Return what a text says, a tree or a list, whose values are still to be checked.

    See `read_tree`.
    """
    try:
        return loads(text)
    except RecursionError:
        raise FileError(f"is not {form}: it is nested too deeply") from None
    except ValueError as error:
        raise FileError(f"is not {form}: {error}") from None


def check_values(node: Any, name: str = "", depth: int = 0) -> None:
    """Refuse impossible or too large numbers, and a tree that is nested deeper than anyone
    writes.
    """
    if depth == DEEPEST:
        raise FileError(f"is nested more than {DEEPEST} deep at {name[:20]}")
    if type(node) in (int, float):
        with retold(FileError, ValueError, before=f"has {name} = {shown(node)}, which "):
            read_number(node, type(node))
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, dict):
        items = node.items()
    elif isinstance(node, list):
        items = enumerate(node)
    for key, value in items:
        check_values(value, f"{name}.{key}" if name else str(key), depth + 1)


def typed(value: Any, kind: Any, limit: Limit | None = None) -> Any:
    """Return a value of a file as a `kind`, one of the keys of `WORDS`.

    A whole number is a number too.

    Raises
    ------
    ValueError
        If it is of another kind; the message says what it must be.
    """
    if kind in (int, float):
        return read_number(None if isinstance(value, str) else value, kind, limit)
    if kind in (str, bool, list, dict):
        if type(value) is not kind or (kind is str and "\0" in value):  # no file has such a name
            raise ValueError(f"must be {WORDS[kind]}")
        if limit is not None and not limit.holds(value):
            raise ValueError(f"must be {limit.words}")
        return value
    entry, *more = kind.__args__
    try:
        if not isinstance(value, list) or (... not in more and len(value) != 1 + len(more)):
            raise ValueError
        return tuple(typed(element, entry) for element in value)
    except ValueError:
        raise ValueError(f"must be {WORDS[kind]}") from None


def flatten(tree: dict[str, Any], kinds: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree by their dotted names, such as `fp16.enabled`.

    A dash in a name is an underscore.

    Parameters
    ----------
    kinds
        By dotted name: a key of `WORDS`, or `object` for any value.

    Raises
    ------
    FileError
        For a name that `kinds` lacks, naming the nearest that it has, and for a value of another
        kind.
    """
    sections = {name.rpartition(".")[0] for name in kinds if "." in name}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = prefix + key.replace("-", "_")
        kind = dict if name in sections else kinds.get(name)
        if kind is None:
            known = [*kinds, *sections]
            alike = difflib.get_close_matches(name, known, 1, 0.5)
            near = [full for full in known if full.endswith(f".{key}")] or alike
            raise FileError(
                f"has an unknown key {name}: "
                f"{f'did you mean {near[0]}?' if near else 'leave it out'}"
            )
        with retold(FileError, ValueError, before=f"has {name} = {shown(value)}, which "):
            value = value if kind is object else typed(value, kind)
        flat |= flatten(value, kinds, f"{name}.") if name in sections else {name: value}
    return flat


def at(
    tree: Any, *keys: str, kind: Any, default: Any = REQUIRED, limit: Limit | None = None
) -> Any:
    """Return the value at `keys`, each a section inside the last, as a `kind`.

    `default` if it is missing or null.

    Raises
    ------
    FileError
        If it is of another kind, or missing without a default.
    """
    for depth, key in enumerate(keys):
        if not isinstance(tree, dict):
            raise FileError(
                f"has {'.'.join(keys[:depth])} = {shown(tree)}, which must be {WORDS[dict]}"
            )
        tree = tree.get(key)
        if tree is None and default is not REQUIRED:
            return default
        if tree is None:
            raise FileError(f"does not say {'.'.join(keys[: depth + 1])}")
    with retold(FileError, ValueError, before=f"has {'.'.join(keys)} = {shown(tree)}, which "):
        return typed(tree, kind, limit)
