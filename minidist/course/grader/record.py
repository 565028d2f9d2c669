"""What goes to a student's process and comes back from it: a signature, and a line of JSON that has
the arrays.

    5be1...
    {"done": true, "arrays": {"shard": ["<f8", [3], "AAAAAAAA8D8AAA..."]}, ...}         their bytes in base 64

The signature is made with the rank's nonce, which is not in the file: reading a record does not
help to make another. A record is no pickle and no archive: to read one runs nothing and unpacks
nothing, whoever wrote it.
"""

import stat
from base64 import b64decode, b64encode
from collections.abc import Mapping
from hmac import compare_digest, digest
from json import dumps, loads
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
    table = {
        name: [each.dtype.str, each.shape, b64encode(each.tobytes()).decode()]
        for name, each in arrays.items()
    }
    text = dumps({**facts, "arrays": table}).encode()
    path.write_bytes(digest(nonce.encode(), text, "sha256").hex().encode() + b"\n" + text)


def read(path: Path, nonce: str = "") -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the facts and the arrays of a record. Raises BadRecord if it is none, or is not signed
    with this nonce.
    """
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
            raise BadRecord(f"{path.name} is not a file, or larger than {LARGEST} bytes")
        signature, _, text = path.read_bytes().partition(b"\n")
        if not compare_digest(signature, digest(nonce.encode(), text, "sha256").hex().encode()):
            raise BadRecord(f"{path.name} bears no signature of this run")
        facts, arrays = loads(text), {}
        for name, (dtype, shape, content) in facts.pop("arrays").items():
            if np.dtype(dtype).kind not in NUMBERS or min(shape, default=0) < 0:
                raise BadRecord(
                    f"{name} has dtype {dtype} and shape {shape}: that is no array of numbers"
                )
            arrays[name] = np.frombuffer(b64decode(content), dtype).reshape(shape)
        return facts, arrays
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadRecord(f"{path.name} is no record: {error}") from error


def plain(results: Mapping[str, Any]) -> dict[str, Array]:
    """Return a program's results as arrays of numbers. Raises Wrong with the name of a result that
    is none, or so large that no record has room for it.
    """
    arrays = {name: np.asarray(value) for name, value in results.items()}
    for name, array in arrays.items():
        if array.dtype.kind not in NUMBERS:
            raise Wrong(
                f"{name} is {type(results[name]).__name__}, expected numbers: is the result "
                "returned?"
            )
        if array.nbytes > LARGEST // 2:  # base 64 takes a third more
            raise Wrong(f"{name} has shape {array.shape}: no answer to this check is so large")
    return arrays
