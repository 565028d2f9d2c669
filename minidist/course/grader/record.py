"""What goes to a student's process and comes back from it: a signature, one line of JSON, the bytes of the arrays.

    5be1...
    {"done": true, "arrays": [["shard", "<f8", [3]]], ...}
    <24 bytes>

The signature is made with the rank's nonce, which is not in the file: reading a record does not help to make another. A
record is no pickle and no archive: to read one runs nothing and unpacks nothing, whoever wrote it.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Mapping
from hmac import compare_digest, digest
from pathlib import Path
from typing import Any

import numpy as np

from minidist.course.grader.contract import Array, Arrays, Wrong

LARGEST = 64 << 20  # bytes of a record
NUMBERS = "biufc"  # kinds of numpy dtypes that are plain numbers


class BadRecord(ValueError):
    """A file is not a record."""


def write(path: Path, facts: Mapping[str, Any], arrays: Arrays, nonce: str = "") -> None:
    """Write facts (JSON) and arrays of numbers, signed with the nonce."""
    table = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    text = json.dumps({**facts, "arrays": table}).encode() + b"\n"
    text += b"".join(array.tobytes() for array in arrays.values())
    path.write_bytes(digest(nonce.encode(), text, "sha256").hex().encode() + b"\n" + text)


def read(path: Path, nonce: str = "") -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the facts and the arrays of a record. Raises BadRecord if it is none, or is not signed with this nonce."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
            raise BadRecord(f"{path.name} is not a file, or larger than {LARGEST} bytes")
        signature, _, text = path.read_bytes().partition(b"\n")
        if not compare_digest(signature, digest(nonce.encode(), text, "sha256").hex().encode()):
            raise BadRecord(f"{path.name} bears no signature of this run")
        head, _, body = text.partition(b"\n")
        facts = json.loads(head)
        arrays, start = {}, 0
        for name, dtype, shape in facts.pop("arrays"):
            kind, count = np.dtype(dtype), math.prod(shape)
            if kind.kind not in NUMBERS or min(shape, default=0) < 0:
                raise BadRecord(f"{name} has dtype {dtype} and shape {shape}: that is no array of numbers")
            arrays[str(name)] = np.frombuffer(body, kind, count, start).reshape(shape)
            start += count * kind.itemsize
        return facts, arrays
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadRecord(f"{path.name} is no record: {error}") from error


def plain(results: Mapping[str, Any]) -> dict[str, Array]:
    """Return a program's results as arrays of numbers. Raises Wrong with the name of a result that is none."""
    arrays = {}
    for name, value in results.items():
        array = np.asarray(value)
        if array.dtype.kind not in NUMBERS:
            raise Wrong(f"{name} is {type(value).__name__}, expected numbers: is the result returned?")
        arrays[name] = array
    return arrays
