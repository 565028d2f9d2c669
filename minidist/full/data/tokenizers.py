"""What turns text into tokens and back: bytes as they are, or a tokenizer of Hugging Face's
library.

Both have `encode`, `encode_document` and `decode`, and `vocabulary`, the number of tokens, which
count from 0.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from minidist.full.data.files import FileError, check_regular, read_tree, retold
from minidist.full.data.sources import TextError

ON_BYTES = "train on bytes (no --tokenizer)"
Tokens = npt.NDArray[np.integer[Any]]


class ByteTokenizer:
    """One token for each byte."""

    vocabulary = 256

    def encode(self, text: bytes) -> Tokens:
        """Return the bytes as numbers, uint8; nothing is copied."""
        return np.frombuffer(text, dtype=np.uint8)

    def encode_document(self, text: bytes) -> Tokens:
        """Return the bytes of a document and of the blank line that ends it."""
        return self.encode(text + b"\n\n")

    def decode(self, tokens: Tokens | Sequence[int]) -> str:
        """Return the text; bytes that are no UTF-8, common in the output of a young model, become
        �.
        """
        return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer of Hugging Face's library `tokenizers`, from the `tokenizer.json` that is
    published with a model.

    Parameters
    ----------
    file : path
        The JSON file.

    Raises
    ------
    TextError
        If the file cannot be read, is not a tokenizer, or the library is not installed.
    """

    def __init__(self, file: str | Path) -> None:
        fix = f"): pip install tokenizers, or {ON_BYTES}"
        with retold(
            TextError,
            ImportError,
            before=f"the tokenizer {file} needs the library `tokenizers` (",
            after=fix,
        ):
            import tokenizers  # here, because training on bytes must not need it
        content = _read(Path(file), option="--tokenizer")
        needed = "): --tokenizer needs the tokenizer.json of a Hugging Face model"
        # it raises any kind
        with retold(TextError, Exception, before=f"{file} is not a tokenizer (", after=needed):
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        # A published file may ask for inputs of one size, and would silently cut a whole corpus
        # down to it.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Not the number of entries: a vocabulary may have gaps, and the embedding needs a row for
        # the largest token.
        self.vocabulary = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        self.end = self._end_of_text(Path(file).with_name("tokenizer_config.json"))
        if self.vocabulary == 0:
            raise TextError(
                f"the tokenizer {file} has an empty vocabulary: give one that has been trained"
            )

    def encode(self, text: bytes) -> Tokens:
        """Return the tokens of a text in UTF-8, without any mark for its beginning or end.

        They have the smallest unsigned type that holds the vocabulary.

        Raises
        ------
        TextError
            If the text is not UTF-8, or holds what the tokenizer has no token for.
        """
        with retold(
            TextError,
            UnicodeError,
            before="the text is not UTF-8 (",
            after=f"): convert it, or {ON_BYTES}",
        ):
            decoded = text.decode("utf-8")
        with retold(
            TextError, Exception, before="the tokenizer refuses the text (", after=f"): {ON_BYTES}"
        ):
            tokens = self._tokenizer.encode(decoded, add_special_tokens=False).ids
        return np.array(tokens, dtype=np.min_scalar_type(self.vocabulary - 1))

    def encode_document(self, text: bytes) -> Tokens:
        """Return the tokens of a document, and behind them the mark for its end, or else a blank
        line.
        """
        if self.end is None:
            return self.encode(text + b"\n\n")
        tokens = self.encode(text)
        return np.append(tokens, tokens.dtype.type(self.end))

    def _end_of_text(self, beside: Path) -> int | None:
        """Return the token that ends a text, if `tokenizer_config.json` names one; published models
        have that file.
        """
        if not beside.is_file():
            return None
        with retold(TextError, FileError, before=f"{beside} "):
            said = read_tree(beside).get("eos_token")
        said = said.get("content") if isinstance(said, dict) else said
        found: int | None = self._tokenizer.token_to_id(said) if isinstance(said, str) else None
        return found

    def decode(self, tokens: Tokens | Sequence[int]) -> str:
        """Return the text, special tokens included."""
        text: str = self._tokenizer.decode(
            [int(token) for token in tokens], skip_special_tokens=False
        )
        return text


Tokenizer: TypeAlias = ByteTokenizer | FileTokenizer


def _read(path: Path, option: str) -> bytes:
    with retold(
        TextError,
        OSError,
        before=f"cannot read {path} (",
        after=f"): check the path given to {option}",
    ):
        check_regular(path)
        content = path.read_bytes()
    if not content:
        raise TextError(f"{path} is empty: give {option} a file with something in it")
    return content
