"""The text a model is trained on, and how it becomes numbers.

    files ──`corpus/`──▶ pieces ──encode──▶ tokens ──split──▶ training part, held-out part ──sequences──▶ samples

    tokens      t0 t1 t2 t3 t4 t5 t6 t7 t8 ...            T = 4
    sample 0    t0 t1 t2 t3 t4                inputs t0..t3, targets t1..t4
    sample 1                t4 t5 t6 t7 t8    inputs t4..t7, targets t5..t8

With no file given, the text is the documentation that every Python carries for its `help()`: 0.45
MB of English that needs no download. It is the same on every run of one Python version, not between
versions.

A text is read, turned into tokens and kept piece by piece, so it may be larger than memory. Between
documents, those of `.jsonl` and `.parquet`, stands the tokenizer's end of text, or else a blank
line.

The default token is the byte: no vocabulary to train, nothing unknown, every file readable. A
tokenizer of Hugging Face's library packs about four bytes of English into a token, for the price of
a larger embedding.
"""

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from minidist.full.data.files import retold
from minidist.full.data.options import DataOptions
from minidist.full.data.packed import Packed, Rows, pack
from minidist.full.data.sources import Piece, read_pieces
from minidist.full.data.sources import TextError as TextError
from minidist.full.data.token_file import TokenFile
from minidist.full.data.tokenizers import ByteTokenizer, FileTokenizer, Tokenizer, Tokens
from minidist.full.ddp.sampler import Indices

Parts = TypeVar("Parts", Tokens, Indices, list[Tokens])


class Corpus(NamedTuple):
    """What a run reads.

    Attributes
    ----------
    tokenizer : Tokenizer
    samples : Samples
        To train on.
    prompt : Tokens
        An opening from the held-out text, or else from the text.
    held_out : Samples or None
        To measure on; None if the held-out text is too short for one sample.
    """

    tokenizer: "Tokenizer"
    samples: "Samples | Packed"
    prompt: Tokens
    held_out: "Samples | Packed | None"


def read_corpus(options: DataOptions) -> Corpus:
    """Read the text of a run, cut it into samples, and hold some of it out, or read that from files
    of its own.

    Raises
    ------
    TextError
        If a file cannot be read, or the text is too short for one sample.
    """
    tokenizer, name = (
        load_tokenizer(options.tokenizer or None),
        " ".join(options.text) or "the built-in text",
    )
    training = tokenized(
        read_pieces(options.text, options.text_field) if options.text else _built_in(),
        tokenizer,
        options,
    )
    if options.eval_text:
        held_out = tokenized(
            read_pieces(options.eval_text, options.text_field, "--eval-text"), tokenizer, options
        )
    else:
        training, held_out = training.split(options.held_out)
    samples = training.samples(options.sequence, name)
    prompt = held_out.beginning() if len(held_out.tokens) else training.beginning()
    try:
        measured = held_out.samples(options.sequence, "the held-out text")
    except TextError:
        measured = None
    return Corpus(tokenizer, samples, _opening(prompt, tokenizer), measured)


@dataclass(frozen=True, eq=False)
class Text:
    """Tokens, and how many of them each document has; `sizes` is None if nobody asks for documents,
    and with `pack` several go into a row.
    """

    tokens: Tokens
    sizes: Indices | None
    pack: bool = False

    def split(self, held_out: float) -> "tuple[Text, Text]":
        """Cut off the end, a fraction of the tokens, or of the documents."""
        if self.sizes is None:
            return tuple(Text(part, None) for part in split(self.tokens, held_out))  # type: ignore[return-value]
        sizes = split(self.sizes, held_out)
        border = int(sizes[0].sum())
        parts = (self.tokens[:border], self.tokens[border:])
        training, measured = (Text(*part, self.pack) for part in zip(parts, sizes, strict=True))
        return training, measured

    def samples(self, T: int, name: str) -> "Samples | Packed":
        """Return what to train on, or to measure on."""
        if self.sizes is None:
            return sequences(self.tokens, T, name)
        found = cut_documents(self.tokens, self.sizes, T, name)
        return found.packed(T) if self.pack else found

    def beginning(self) -> Tokens:
        """Return the first document that is not empty; without documents, all."""
        if self.sizes is None:
            return self.tokens
        return self.tokens[: int(self.sizes[self.sizes > 0][0])]


def tokenized(pieces: Iterable[Piece], tokenizer: "Tokenizer", options: DataOptions) -> Text:
    """Turn pieces of text into tokens, one after the other.

    With `--by-length` and `--pack`, each paragraph of plain text is a document.

    Raises
    ------
    TextError
        If the tokenizer refuses the text, or the disk is full.
    """
    sizes: list[int] = []
    dtype = np.min_scalar_type(tokenizer.vocabulary - 1)
    full = "the tokens do not fit on the disk ("
    with (
        TokenFile(dtype) as file,
        retold(TextError, OSError, before=full, after="): set TMPDIR to a larger one"),
    ):
        for text, document in pieces:
            parts = paragraphs(text) if options.by_document and not document else [text]
            for part in parts:
                tokens = tokenizer.encode_document(part) if document else tokenizer.encode(part)
                file.append(tokens)
                sizes.append(len(tokens))
        whole = file.finish()
        if not options.by_document:
            return Text(whole, None)
        return Text(whole, np.array(sizes, np.int64), options.pack)


def load_text(files: Sequence[str | Path] = ()) -> bytes:
    """Return the contents of the files, one after the other; without files, Python's own
    documentation.

    Raises
    ------
    TextError
        If a file cannot be read or is empty.
    """
    pieces = read_pieces(files) if files else _built_in()
    return b"".join(piece.text for piece in pieces)


def load_tokenizer(file: str | Path | None = None) -> "Tokenizer":
    """Return the tokenizer of a `tokenizer.json` file; without a file, bytes.

    Raises
    ------
    TextError
        If the file cannot be read, is not a tokenizer, or the library `tokenizers` is not
        installed.
    """
    return ByteTokenizer() if file is None else FileTokenizer(file)


def paragraphs(text: bytes) -> list[bytes]:
    """Cut a text after its blank lines. Each paragraph keeps the one that ends it: a model can
    learn when to stop.
    """
    return re.findall(rb"(?s).+?(?:\n\s*\n|\Z)", text)


def split(parts: Parts, held_out: float = 0.1) -> tuple[Parts, Parts]:
    """Cut tokens, or a list of documents, into a part to train on and a part to measure on.

    The held-out part is the end, not a random choice: neighbouring lines often repeat each other,
    so lines drawn at random would have been seen in training, almost word for word.

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
    """Samples as spans of one long array of tokens.

    Sample i is `tokens[starts[i] : starts[i] + lengths[i]]`.

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
        """Return the tokens [len(indices), width] of some samples, shorter ones padded on the
        right.
        """
        columns = np.arange(width)
        real = columns < self.lengths[indices][:, None]  # [b, width]
        places = np.where(real, self.starts[indices][:, None] + columns, 0)
        return np.where(real, self.tokens[places].astype(np.int64), padding)

    def filled(self, indices: Indices, width: int, ignored: int) -> Rows:
        """Return inputs and targets of some samples, padded on the right to so many tokens; a target
        of padding is `ignored`.
        """
        rows = self.rows(indices, width + 1, padding=ignored)
        # Which token pads the inputs does not matter: attention is causal, so no real position sees
        # it.
        return Rows(rows[:, :-1].clip(min=0), np.ascontiguousarray(rows[:, 1:]))

    def packed(self, T: int) -> Packed:
        """Return rows of T inputs that have these samples packed into them, each as a document."""
        members = pack(self.lengths - 1, T)
        return Packed(self.tokens, self.starts, self.lengths, members, T)

    def words(self, T: int) -> str:
        """Say what is trained on."""
        return f"{len(self):,} samples of up to {T} tokens"

    def checksum(self) -> int:
        """Return a number that differs, almost surely, if the text or the way it is cut does."""
        number = 0
        for array in (self.tokens, self.starts, self.lengths):
            number = zlib.crc32(np.ascontiguousarray(array).data, number)
        return number


def sequences(tokens: Tokens, T: int, name: str = "the text") -> Samples:
    """Cut a text into samples of T inputs each.

    Samples have T + 1 tokens and begin T apart, so every token but the first is a target once. What
    is left at the end, fewer than T targets, is left out.

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


def documents(texts: Sequence[Tokens], T: int) -> Samples:
    """Make each document a sample; see `cut_documents`."""
    whole = np.concatenate(texts) if len(texts) else np.zeros(0, np.uint8)
    return cut_documents(whole, np.array([len(text) for text in texts], np.int64), T)


def cut_documents(tokens: Tokens, sizes: Indices, T: int, name: str = "the text") -> Samples:
    """Make each document a sample, cutting those of more than T inputs into several.

    Parameters
    ----------
    tokens, sizes
        Of all documents, one after the other, and how many tokens each has. A document of a single
        token has no target and is left out.

    Raises
    ------
    TextError
        If no document is left.
    """
    spans = []
    first = 0  # where this document begins in the long array
    for size in sizes.tolist():
        spans += [(first + start, min(T + 1, size - start)) for start in range(0, size - 1, T)]
        first += size
    if not spans:
        raise TextError(
            f"{name} has {len(sizes)} documents, none with two tokens or more: give more text"
        )
    starts, lengths = np.array(spans).T
    return Samples(tokens, starts, lengths)


def _opening(tokens: Tokens, tokenizer: Tokenizer) -> Tokens:
    """Return 32 tokens of a text from where a paragraph begins, if one does soon: half a table is
    no opening.
    """
    found = re.search(r"\n\n([A-Z][^\n]{40}.{200})", tokenizer.decode(tokens[:8000]), re.DOTALL)
    return (tokenizer.encode(found[1].encode()) if found else tokens)[:32]


def _built_in() -> Iterator[Piece]:
    yield Piece(_python_documentation(), document=False)


def _python_documentation() -> bytes:
    with retold(
        TextError,
        ImportError,
        before="this Python lacks its documentation (",
        after="): give --text FILE",
    ):
        from pydoc_data.topics import topics
    # Sorted: the order in the source of one Python version is an accident.
    return "\n\n".join(topics[name].strip("\n") for name in sorted(topics)).encode("utf-8")
