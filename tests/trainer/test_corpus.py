"""Text from .jsonl, .parquet and folders: in one order, piece by piece, and never the whole of it
in memory.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from training import losses, train_on

from minidist.full.data import sources, token_file
from minidist.full.data.options import DataOptions
from minidist.full.data.sources import TextError, read_pieces
from minidist.full.data.text import load_text, paragraphs, read_corpus
from minidist.full.data.token_file import TokenFile

DOCUMENTS = ["One.", "Zwei größere\nZeilen.", "", "3 " * 50, "\u2028vier\u0085 fünf"]


def write_jsonl(file: Path, texts: list[str], field: str = "text") -> Path:
    lines = [json.dumps({"id": number, field: text}) for number, text in enumerate(texts)]
    file.write_text("\n".join(lines) + "\n\n")
    return file


def write_parquet(file: Path, texts: list[str | None], field: str = "text") -> Path:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": range(len(texts)), field: pyarrow.array(texts, pyarrow.string())})
    parquet.write_table(table, file, row_group_size=2)
    return file


def words_of(*files: Path, field: str = "text") -> list[str]:
    return [piece.text.decode() for piece in read_pieces(files, field)]


def refused(*files: Path, field: str = "text") -> str:
    with pytest.raises(TextError) as error:
        list(read_pieces(files, field))
    message = str(error.value)
    assert "\n" not in message
    return message


def test_each_document_comes_once_and_in_order(tmp_path: Path) -> None:
    assert words_of(write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)) == DOCUMENTS
    assert words_of(write_parquet(tmp_path / "b.parquet", [*DOCUMENTS, None])) == DOCUMENTS
    assert (
        words_of(write_jsonl(tmp_path / "c.jsonl", DOCUMENTS, "content"), field="content")
        == DOCUMENTS
    )


def test_a_folder_is_its_files_sorted_by_path(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write_jsonl(tmp_path / "b.jsonl", ["b"])
    write_parquet(tmp_path / "sub" / "a.parquet", ["sub"])
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "c.md").write_text("c")
    (tmp_path / "picture.png").write_bytes(b"\x00")
    assert words_of(tmp_path) == ["a", "b", "c", "sub"]
    assert words_of(tmp_path / "c.md", tmp_path / "sub") == ["c", "sub"]


def test_faults_name_the_file_the_line_and_the_fields_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"txt": "y", "n": 1}\n')
    assert refused(tmp_path / "a.jsonl").endswith(
        "a.jsonl, line 2, has no text in 'text': name the field by --text-field (txt)"
    )
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": \n')
    assert "a.jsonl, line 2, is not JSON (" in refused(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("[" * 100_000)
    assert "a.jsonl, line 1, is not JSON (" in refused(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text("[1]\n")
    assert "a.jsonl, line 1, is no object" in refused(tmp_path / "a.jsonl")
    file = write_parquet(tmp_path / "b.parquet", ["x"], "content")
    assert refused(file).endswith(
        "b.parquet has no column of text 'text': name it by --text-field (content)"
    )
    file.write_bytes(b"PAR1" + file.read_bytes()[8:])
    assert "b.parquet is not Parquet (" in refused(file, field="content")
    (tmp_path / "empty").mkdir()
    assert "is a directory without .txt, .md, .jsonl, .parquet files" in refused(tmp_path / "empty")
    (tmp_path / "full" / "locked").mkdir(parents=True)
    (tmp_path / "full" / "a.txt").write_text("x")
    look = os.scandir

    def locked(path: str) -> object:
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return look(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", locked)
        said = refused(tmp_path / "full")
    assert said.endswith("full/locked (Permission denied): check the path given to --text")
    (tmp_path / "b.parquet").write_bytes(b"abc")
    assert "b.parquet is not Parquet (" in refused(tmp_path / "b.parquet")
    assert refused(write_jsonl(tmp_path / "c.jsonl", ["", ""])).endswith("c.jsonl is empty: give --text a file with "
                                                                         "something in it")  # fmt: skip
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "needs the library `pyarrow`" in refused(tmp_path / "b.parquet")


def test_a_long_text_is_cut_where_a_paragraph_ends_or_a_line_or_a_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_text()[:60_000]
    (tmp_path / "a").write_bytes(whole)
    (tmp_path / "lines").write_text("a line of words\n" * 3000)
    (tmp_path / "umlauts").write_text("ä" * 5000)
    monkeypatch.setattr(sources, "PIECE", 4001)
    pieces = [piece.text for piece in read_pieces([tmp_path / "a"])]
    assert len(pieces) > 10 and b"".join(pieces) == whole
    assert [part for piece in pieces for part in paragraphs(piece)] == paragraphs(whole)
    assert all(piece.text.endswith(b"words\n") for piece in read_pieces([tmp_path / "lines"]))
    assert "".join(words_of(tmp_path / "umlauts")) == "ä" * 5000  # each piece is UTF-8


def test_between_documents_stands_the_end_of_text_or_a_blank_line(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    file = write_jsonl(tmp_path / "a.jsonl", ["ab", "b", "aab"])
    options = DataOptions(text=(str(file),), sequence=4, held_out=0.0)
    assert bytes(read_corpus(options).samples.tokens) == b"ab\n\nb\n\naab\n\n"
    plain = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "<end>": 2, "\n": 3}, []))
    plain.add_special_tokens(["<end>"])
    plain.save(str(tmp_path / "tokenizer.json"))
    options = DataOptions(
        text=options.text, sequence=2, held_out=0.0, tokenizer=str(tmp_path / "tokenizer.json")
    )
    assert read_corpus(options).samples.tokens.tolist() == [0, 1, 3, 3, 1, 3, 3, 0, 0, 1, 3, 3]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    assert read_corpus(options).samples.tokens.tolist() == [0, 1, 2, 1, 2, 0, 0, 1, 2]
    documents = read_corpus(DataOptions(**vars(options) | {"by_length": True})).samples
    assert documents.starts.tolist() == [0, 3, 5, 7] and documents.lengths.tolist() == [3, 2, 3, 2]


def test_a_text_larger_than_memory_is_never_held_whole(tmp_path: Path) -> None:
    """64 MiB of documents are read, cut and sampled with at most 24 MiB, of which 16 are tokens
    before they spill.
    """
    megabyte, file = "x" * ((1 << 20) - 2), tmp_path / "large.jsonl"
    with file.open("w") as lines:
        for _ in range(64):
            lines.write(json.dumps({"text": megabyte}) + "\n")
    tracemalloc.start()
    try:
        corpus = read_corpus(DataOptions(text=(str(file),), sequence=1024))
        rows = corpus.samples.rows(np.array([0, 40_000, len(corpus.samples) - 1]), 1025, 0)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (
        isinstance(corpus.samples.tokens, np.memmap) and len(corpus.samples) == 1024 * 64 * 19 // 20
    )
    assert rows.shape == (3, 1025) and set(np.unique(rows)) <= {ord("x"), ord("\n")}
    assert most < 24 << 20


def test_tokens_in_a_file_are_those_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the borders of what was appended; the file goes with the array."""
    parts = [
        np.arange(start, start + count, dtype="uint16")
        for start, count in ((0, 5), (5, 0), (5, 900), (905, 1))
    ]
    arrays = []
    for limit in (1 << 20, 100, 0):
        monkeypatch.setattr(token_file, "IN_MEMORY", limit)
        with TokenFile("uint16") as file:
            for part in parts:
                file.append(part)
            arrays.append(file.finish())
    assert [type(array) is np.memmap for array in arrays] == [False, True, True]
    assert all(array.tolist() == list(range(906)) for array in arrays)
    assert not list(Path(tempfile.gettempdir()).glob("minidist-tokens-*"))


def test_a_run_on_a_folder_is_resumed_at_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens lie in a file, and three ranks go on where two were stopped, in the second
    epoch.
    """
    monkeypatch.setattr(token_file, "IN_MEMORY", 1000)
    (tmp_path / "text").mkdir()
    texts = [part.decode() for part in paragraphs(load_text()[:1500])]
    write_jsonl(tmp_path / "text" / "a.jsonl", texts[::2])
    write_parquet(tmp_path / "text" / "b.parquet", [*texts[1::2]])
    words = f"--text {tmp_path / 'text'} --precision float64 --save-every 1 --keep 20 --steps 15"
    assert train_on(2, words, f"--save {tmp_path / 'whole'}") == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for checkpoint in sorted((tmp_path / "parts").glob("step-*"))[12:]:
        shutil.rmtree(checkpoint)
    assert train_on(3, words, f"--save {tmp_path / 'parts'} --resume") == 0
    whole, parts = (dict(losses(tmp_path / run / "metrics.jsonl")) for run in ("whole", "parts"))
    assert list(parts) == list(range(1, 16)) and [*parts.values()] == pytest.approx(
        [*whole.values()], rel=1e-11
    )
    last = json.loads((tmp_path / "parts" / "step-00000015" / "state.json").read_text())
    assert last["batches"]["epoch"] == 1 and last["batches"]["position"] > 0


def test_files_that_are_read_twice_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(f"{name} " * 100)
    link = tmp_path / "link.txt"
    link.symlink_to(folder / "b.txt")
    words = f"--steps 1 --eval-every 1 --text {folder} {link} --eval-text {folder}"
    assert train_on(2, words) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"{link}: named twice by --text, so what it says comes twice",
        f"{folder / 'a.txt'} (and 1 more): in --text and in --eval-text, so what is measured has been "
        "trained on",
    ]
    alone = f"--steps 1 --eval-every 1 --text {folder / 'a.txt'} --eval-text {link}"
    assert train_on(2, alone) == 0
    assert "--text" not in capsys.readouterr().out


def test_a_name_that_no_file_can_have_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_on(2, f"--steps 1 --text {'x' * 5000}") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "(File name too long): check the path given to --text" in said
