"""Plain text, `.jsonl` and `.parquet`, and folders of them, one piece after the other.

    notes.txt        any name      a long text, in pieces of about `PIECE` bytes
    books.jsonl      one object    {"text": "..."} a line: each is a document
    web.parquet      one row       of the column `text`: each is a document
    folder/          in the order of their paths: .txt, .md, .jsonl and .parquet; other files are left out

Only one piece, or one document, is in memory at a time. The order depends on the names of the files
alone.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minidist.full.data.files import check_regular, retold

PIECE = 4 << 20  # bytes of plain text that are read at a time
ROWS = 256  # of a parquet file that are read at a time
LISTED = (".txt", ".md", ".jsonl", ".parquet")  # what is read in a folder
PARAGRAPH = re.compile(rb"\n\s*\n(?=[^\S\n]*\S)")


class TextError(ValueError):
    """The text, or the tokenizer, cannot be used; the message says why and what to do."""


class Piece(NamedTuple):
    """Some text: a whole document, or the next part of a long one."""

    text: bytes
    document: bool


def read_pieces(
    files: Sequence[str | Path], field: str = "text", option: str = "--text"
) -> Iterator[Piece]:
    """Yield the text of files, and of the files in folders.

    Parameters
    ----------
    field : str
        What holds the text: a key of each object in `.jsonl`, a column in `.parquet`.
    option : str
        The flag that named the files, for messages.

    Raises
    ------
    TextError
        If a file cannot be read, or has no text; when its turn comes.
    """
    for file in listed(files, option):
        some = False
        with retold(
            TextError,
            OSError,
            before=f"cannot read {file} (",
            after=f"): check the path given to {option}",
        ):
            check_regular(file)
            for piece in _reader(file, field):
                some = some or bool(piece.text)
                yield piece
        if not some:
            raise TextError(f"{file} is empty: give {option} a file with something in it")


def listed(files: Sequence[str | Path], option: str = "--text") -> Iterator[Path]:
    """Yield the files, and in place of each folder the files in it that can be read, sorted by
    their paths. TextError if it has none, or one of its folders cannot be looked into.
    """
    for path in map(Path, files):
        if not os.path.isdir(path):  # which, unlike `Path.is_dir`, takes names that are too long
            yield path
            continue
        every = _inside(path, option)
        found = sorted(file for file in every if file.suffix in LISTED and file.is_file())
        if not found:
            raise TextError(
                f"{path} is a directory without {', '.join(LISTED)} files: give {option} files, "
                "or another"
            )
        yield from found


def _inside(folder: Path, option: str) -> Iterator[Path]:
    """Yield every file of a folder and of those in it. None is left out because it cannot be seen:
    nobody would miss it.
    """

    def refuse(error: OSError) -> None:
        raise TextError(
            f"cannot look into {error.filename} ({error.strerror}): check the path given to {option}"
        )

    for place, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(place, name) for name in names)


def said_twice(text: Sequence[str | Path], eval_text: Sequence[str | Path]) -> list[str]:
    """Return sentences on files that are read twice, under whatever names: nothing forbids it, but
    few mean it.

    Raises
    ------
    TextError
        If a folder has no text.
    """
    training = [(_which(file), file) for file in listed(text)]
    measuring = [(_which(file), file) for file in listed(eval_text, "--eval-text")]
    trained_on = {which for which, _ in training}
    both = [file for which, file in measuring if which in trained_on]
    notes = []
    for option, named in (("--text", training), ("--eval-text", measuring)):
        seen: set[object] = set()
        again = []
        for which, file in named:
            if which in seen:
                again.append(file)
            seen.add(which)
        if again:
            notes.append(
                f"{_first_of(again)}: named twice by {option}, so what it says comes twice"
            )
    if both:
        notes.append(
            f"{_first_of(both)}: in --text and in --eval-text, so what is measured has been trained on"
        )
    return notes


def _first_of(files: Sequence[Path]) -> str:
    more = f" (and {len(files) - 1} more)" if len(files) > 1 else ""
    return f"{files[0]}{more}"


def _which(file: Path) -> object:
    """Return what two names of one file have in common."""
    try:
        status = file.stat()
    except OSError:
        return file  # whoever reads it will say so
    return status.st_dev, status.st_ino


def _reader(file: Path, field: str) -> Iterator[Piece]:
    if file.suffix == ".jsonl":
        return _jsonl(file, field)
    return _parquet(file, field) if file.suffix == ".parquet" else _plain(file)


def _plain(file: Path) -> Iterator[Piece]:
    """Yield a text in pieces. Each ends with a paragraph if it can, or else with a line, or else
    with a character.
    """
    left = b""
    with file.open("rb") as opened:
        while block := opened.read(PIECE):
            left += block
            if len(left) >= PIECE:
                end = _end(left)
                yield Piece(left[:end], document=False)
                left = left[end:]
    if left:
        yield Piece(left, document=False)


def _end(text: bytes) -> int:
    """Return where to cut a text of which more is to come."""
    end = 0
    for found in PARAGRAPH.finditer(text):
        end = found.end()
    end = end or text.rfind(b"\n") + 1 or text.rfind(b" ")
    if end > 0:
        return end
    end = len(text) - 1
    while end > len(text) - 4 and text[end] & 0xC0 == 0x80:  # inside a character of UTF-8
        end -= 1
    return end


def _jsonl(file: Path, field: str) -> Iterator[Piece]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}, line {number}, "
            with retold(
                TextError,
                ValueError,
                RecursionError,
                before=f"{where}is not JSON (",
                after="): mend it",
            ):
                record = json.loads(line)
            if not isinstance(record, dict):
                raise TextError(f"{where}is no object {{...}}: a line of .jsonl is one document")
            yield Piece(
                _text_of(where, record, field).encode("utf-8", "surrogatepass"), document=True
            )


def _text_of(where: str, record: dict[str, Any], field: str) -> str:
    text = record.get(field)
    if isinstance(text, str):
        return text
    strings = ", ".join(
        sorted(name for name, value in record.items() if isinstance(value, str))[:5]
    )
    raise TextError(
        f"{where}has no text in {field!r}: name the field by --text-field "
        f"({strings or 'there is none'})"
    )


def _parquet(file: Path, field: str) -> Iterator[Piece]:
    needs = f"{file} needs the library `pyarrow` ("
    with retold(
        TextError, ImportError, before=needs, after="): pip install pyarrow, or give .jsonl"
    ):
        import pyarrow
        import pyarrow.parquet
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            kinds = (pyarrow.types.is_string, pyarrow.types.is_large_string)
            strings = [
                each.name for each in opened.schema_arrow if any(kind(each.type) for kind in kinds)
            ]
            if field not in strings:
                there = ", ".join(strings[:5]) or "there is none"
                raise TextError(
                    f"{file} has no column of text {field!r}: name it by --text-field ({there})"
                )
            for batch in opened.iter_batches(batch_size=ROWS, columns=[field]):
                for text in batch.column(0):
                    if text.is_valid:
                        yield Piece(text.as_py().encode(), document=True)
    except (pyarrow.ArrowException, OSError) as error:
        said = str(error).partition("\n")[0]
        raise TextError(f"{file} is not Parquet ({said}): copy it again, or leave it out") from None
