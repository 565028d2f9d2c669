"""The text a model is trained on, and how it becomes numbers.

    files ──load_text──▶ bytes ──encode──▶ tokens ──split──▶ training part, held-out part ──sequences──▶ samples

    tokens      t0 t1 t2 t3 t4 t5 t6 t7 t8 ...            T = 4
    sample 0    t0 t1 t2 t3 t4                inputs t0..t3, targets t1..t4
    sample 1                t4 t5 t6 t7 t8    inputs t4..t7, targets t5..t8

With no file given, the text is the documentation that every Python carries for its `help()`: 0.45 MB of English that
needs no download. It is the same on every run of one Python version, not between versions.

The default token is the byte: no vocabulary to train, nothing unknown, every file readable. A tokenizer of Hugging
Face's library packs about four bytes of English into a token, for the price of a larger embedding.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from minidist.parallel.data.sampler import Indices
from minidist.trainer.config import DataOptions
from minidist.trainer.files import check_regular, retold

ON_BYTES = "train on bytes (no --tokenizer)"
Tokens = npt.NDArray[np.integer[Any]]
Parts = TypeVar("Parts", Tokens, list[Tokens])


class TextError(ValueError):
    """The text, or the tokenizer, cannot be used; the message says why and what to do."""


def read_corpus(options: DataOptions) -> "tuple[Tokenizer, Samples, Tokens]":
    """Return the tokenizer, the samples to train on, and an opening from the held-out text, or else from the text."""
    text, tokenizer = load_text(options.text), load_tokenizer(options.tokenizer or None)
    name = " ".join(options.text) or "the built-in text"
    if options.by_length:
        training, rest = split([tokenizer.encode(part) for part in paragraphs(text)], options.held_out)
        samples = documents(training, options.sequence, name)
        prompt = next(part for part in (*rest, *training) if len(part))
    else:
        tokens, held_out = split(tokenizer.encode(text), options.held_out)
        samples = sequences(tokens, options.sequence, name)
        prompt = held_out if len(held_out) else tokens
    return tokenizer, samples, _opening(prompt, tokenizer)


def load_text(files: Sequence[str | Path] = ()) -> bytes:
    """Return the contents of the files, one after the other; without files, Python's own documentation.

    Raises
    ------
    TextError
        If a file cannot be read or is empty.
    """
    return b"".join(_read(Path(file)) for file in files) if files else _python_documentation()


def load_tokenizer(file: str | Path | None = None) -> "Tokenizer":
    """Return the tokenizer of a `tokenizer.json` file; without a file, bytes.

    Raises
    ------
    TextError
        If the file cannot be read, is not a tokenizer, or the library `tokenizers` is not installed.
    """
    return ByteTokenizer() if file is None else FileTokenizer(file)


def paragraphs(text: bytes) -> list[bytes]:
    """Cut a text after its blank lines. Each paragraph keeps the one that ends it: a model can learn when to stop."""
    return re.findall(rb"(?s).+?(?:\n\s*\n|\Z)", text)


def split(parts: Parts, held_out: float = 0.1) -> tuple[Parts, Parts]:
    """Cut tokens, or a list of documents, into a part to train on and a part to measure on.

    The held-out part is the end, not a random choice: neighbouring lines often repeat each other, so lines drawn at
    random would have been seen in training, almost word for word.

    Parameters
    ----------
    parts : array of tokens, or list of such arrays
    held_out : float
        The fraction held out, from 0 to 1.
    """
    border = len(parts) - round(len(parts) * held_out)
    return parts[:border], parts[border:]


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples as spans of one long array of tokens: sample i is tokens[starts[i] : starts[i] + lengths[i]].

    Attributes
    ----------
    tokens : integer array
    starts, lengths : int64 arrays [number of samples]
        A sample of n tokens has n - 1 targets.
    """

    tokens: Tokens
    starts: Indices
    lengths: Indices

    def __len__(self) -> int:
        return len(self.starts)

    def rows(self, indices: Indices, width: int, padding: int) -> Indices:
        """Return the tokens [len(indices), width] of some samples, shorter ones padded on the right."""
        columns = np.arange(width)
        real = columns < self.lengths[indices][:, None]  # [b, width]
        places = np.where(real, self.starts[indices][:, None] + columns, 0)
        return np.where(real, self.tokens[places].astype(np.int64), padding)

    def checksum(self) -> int:
        """Return a number that differs, almost surely, if the text or the way it is cut does."""
        number = 0
        for array in (self.tokens, self.starts, self.lengths):
            number = zlib.crc32(np.ascontiguousarray(array).data, number)
        return number


def sequences(tokens: Tokens, T: int, name: str = "the text") -> Samples:
    """Cut a text into samples of T inputs each.

    Samples have T + 1 tokens and begin T apart, so every token but the first is a target once. What is left at the
    end, fewer than T targets, is left out.

    Raises
    ------
    TextError
        If the text, called `name` in the message, is too short for one.
    """
    count = (len(tokens) - 1) // T
    if count < 1:
        need = f"one sequence of T = {T} inputs needs {T + 1}: give more text, or shorter sequences"
        raise TextError(f"{name} has {len(tokens)} tokens, but {need}")
    return Samples(tokens, np.arange(count) * T, np.full(count, T + 1))


def documents(texts: Sequence[Tokens], T: int, name: str = "the text") -> Samples:
    """Make each document a sample, cutting those of more than T inputs into several.

    A document of a single token has no target and is left out.

    Raises
    ------
    TextError
        If no document is left.
    """
    spans = []
    first = 0  # where this document begins in the long array
    for text in texts:
        spans += [(first + start, min(T + 1, len(text) - start)) for start in range(0, len(text) - 1, T)]
        first += len(text)
    if not spans:
        raise TextError(f"{name} has {len(texts)} documents, none with two tokens or more: give more text")
    starts, lengths = np.array(spans).T
    return Samples(np.concatenate(texts), starts, lengths)


class ByteTokenizer:
    """One token for each byte."""

    vocabulary = 256

    def encode(self, text: bytes) -> Tokens:
        """Return the bytes as numbers, uint8; nothing is copied."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, tokens: Tokens | Sequence[int]) -> str:
        """Return the text; bytes that are no UTF-8, common in the output of a young model, become �."""
        return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer of Hugging Face's library `tokenizers`, from the `tokenizer.json` that is published with a model.

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
        with retold(TextError, ImportError, before=f"the tokenizer {file} needs the library `tokenizers` (", after=fix):
            import tokenizers  # here, because training on bytes must not need it
        content = _read(Path(file), option="--tokenizer")
        needed = "): --tokenizer needs the tokenizer.json of a Hugging Face model"
        with retold(TextError, Exception, before=f"{file} is not a tokenizer (", after=needed):  # it raises any kind
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        # A published file may ask for inputs of one size, and would silently cut a whole corpus down to it.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Not the number of entries: a vocabulary may have gaps, and the embedding needs a row for the largest token.
        self.vocabulary = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        if self.vocabulary == 0:
            raise TextError(f"the tokenizer {file} has an empty vocabulary: give one that has been trained")

    def encode(self, text: bytes) -> Tokens:
        """Return the tokens of a text in UTF-8, without any mark for its beginning or end.

        They have the smallest unsigned type that holds the vocabulary.

        Raises
        ------
        TextError
            If the text is not UTF-8, or holds what the tokenizer has no token for.
        """
        with retold(TextError, UnicodeError, before="the text is not UTF-8 (", after=f"): convert it, or {ON_BYTES}"):
            decoded = text.decode("utf-8")
        with retold(TextError, Exception, before="the tokenizer refuses the text (", after=f"): {ON_BYTES}"):
            tokens = self._tokenizer.encode(decoded, add_special_tokens=False).ids
        return np.array(tokens, dtype=np.min_scalar_type(self.vocabulary - 1))

    def decode(self, tokens: Tokens | Sequence[int]) -> str:
        """Return the text, special tokens included."""
        text: str = self._tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)
        return text


Tokenizer: TypeAlias = ByteTokenizer | FileTokenizer
"""Turns text into tokens and back: `encode`, `decode`, and `vocabulary`, the number of tokens, which count from 0."""


def _opening(tokens: Tokens, tokenizer: Tokenizer) -> Tokens:
    """Return 32 tokens of a text from where a paragraph begins, if one does soon: half a table is no opening."""
    found = re.search(r"\n\n([A-Z][^\n]{40}.{200})", tokenizer.decode(tokens[:8000]), re.DOTALL)
    return (tokenizer.encode(found[1].encode()) if found else tokens)[:32]


def _read(path: Path, option: str = "--text") -> bytes:
    with retold(TextError, OSError, before=f"cannot read {path} (", after=f"): check the path given to {option}"):
        check_regular(path)
        content = path.read_bytes()
    if not content:
        raise TextError(f"{path} is empty: give {option} a file with something in it")
    return content


def _python_documentation() -> bytes:
    with retold(TextError, ImportError, before="this Python lacks its documentation (", after="): give --text FILE"):
        from pydoc_data.topics import topics
    # Sorted: the order in the source of one Python version is an accident.
    return "\n\n".join(topics[name].strip("\n") for name in sorted(topics)).encode("utf-8")
