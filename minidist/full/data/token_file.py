"""An array that grows: in memory while it is short, and then in a file, which the operating system
reads on demand.

    append, append, ... ──▶ bytes in memory ──more than IN_MEMORY──▶ temporary file ──finish──▶ mapped array

The file has no name: it goes when the last array over it does, also if the program is killed.
`TMPDIR` says where.
"""

import tempfile
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

IN_MEMORY = 16 << 20  # bytes


class TokenFile:
    """Collects tokens of one dtype. Use it in a `with` block, which closes the file.

    Raises
    ------
    OSError
        In `append`, if the disk is full.
    """

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self.length = 0  # tokens so far
        self._short = bytearray()
        self._file: IO[bytes] | None = None

    def append(self, tokens: npt.NDArray[Any]) -> None:
        """Add tokens at the end."""
        content = np.ascontiguousarray(tokens, self.dtype).data.cast("B") if len(tokens) else b""
        self.length += len(tokens)
        if self._file is None and len(self._short) + len(content) > IN_MEMORY:
            self._file = tempfile.TemporaryFile(prefix="minidist-tokens-")  # noqa: SIM115 - closed by `__exit__`
            self._file.write(self._short)
            self._short = bytearray()
        if self._file is None:
            self._short += content
        else:
            self._file.write(content)

    def finish(self) -> npt.NDArray[Any]:
        """Return all tokens as one array, which must not be written to."""
        if self._file is None:
            return np.frombuffer(self._short, self.dtype)
        self._file.flush()
        return np.memmap(self._file, self.dtype, mode="r", shape=(self.length,))

    def __enter__(self) -> "TokenFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()  # an array that was mapped stays
