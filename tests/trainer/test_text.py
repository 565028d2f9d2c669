"""From files to tokens, with errors in one sentence; and batches read ahead, with a restart at
exactly the next one.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training import batches_of

from minidist.full.data.text import (
    ByteTokenizer,
    FileTokenizer,
    Samples,
    TextError,
    Tokens,
    documents,
    load_text,
    load_tokenizer,
    paragraphs,
    sequences,
    split,
)
from minidist.full.ddp.sampler import State
from minidist.full.trainer.batches import Batch, ReadAhead

TOKENS = np.arange(1, 204)  # every token different, none of them 0


def same(a: Batch, b: Batch) -> bool:
    return torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets) and a[2:] == b[2:]


def many_documents() -> Samples:
    sizes = np.random.default_rng(0).integers(1, 12, 40)
    return documents([np.arange(size) + 100 * number for number, size in enumerate(sizes)], T=8)


# The text


def test_the_default_text_is_english_and_always_the_same() -> None:
    text = load_text()
    assert text == load_text() and len(text) > 300_000
    assert text.count(b" the ") > 3000


def test_own_files_are_put_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"first\n")
    (tmp_path / "b").write_bytes(b"\xff\x00")
    assert load_text([tmp_path / "a", str(tmp_path / "b")]) == b"first\n\xff\x00"


@given(st.binary())
def test_bytes_survive_and_paragraphs_lose_nothing(text: bytes) -> None:
    assert ByteTokenizer().encode(text).tolist() == list(text)
    assert b"".join(paragraphs(text)) == text


def test_paragraphs_end_with_their_blank_line() -> None:
    text = b"a\nb\n\n\n  c\r\n\r\nd\n \ne"
    assert paragraphs(text) == [b"a\nb\n\n\n", b"  c\r\n\r\n", b"d\n \n", b"e"]


def test_bytes_decode_to_text() -> None:
    assert ByteTokenizer().decode(ByteTokenizer().encode("größer".encode())) == "größer"
    assert ByteTokenizer().decode([104, 105, 255]) == "hi�"


def test_the_held_out_part_is_the_end() -> None:
    training, held_out = split(TOKENS, 0.1)
    assert len(held_out) == 20 and np.concatenate([training, held_out]).tolist() == TOKENS.tolist()
    texts: list[Tokens] = [TOKENS, TOKENS[:2], TOKENS[:3]]
    assert [len(part) for part in split(texts, 0.3)] == [2, 1]


def test_errors_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").touch()
    for file, message in (("missing", "No such file"), ("empty", "is empty"), (".", "directory")):
        with pytest.raises(TextError, match=rf"{message}.*--text"):
            load_text([tmp_path / file])
    with pytest.raises(
        TextError, match=r"training part has 8 tokens, but one sequence of T = 8 inputs needs 9"
    ):
        sequences(TOKENS[:8], T=8, name="the training part")
    for texts in ([], [TOKENS[:1], TOKENS[:0]]):
        with pytest.raises(TextError, match=f"has {len(texts)} documents, none with two tokens"):
            documents(texts, T=8)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(TextError, match=r"lacks its documentation .*: give --text FILE"):
        load_text()


# A tokenizer from a file


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    byte_pairs = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_pairs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_pairs.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=alphabet
    )
    byte_pairs.train_from_iterator([load_text()[:50_000].decode()], trainer)
    byte_pairs.enable_truncation(16)  # as published files often do
    file: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_pairs.save(str(file))
    return file


def test_a_tokenizer_file_gives_back_the_whole_text(tokenizer_file: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_file)
    text = load_text()[:20_000]
    tokens = tokenizer.encode(text)
    assert tokenizer.vocabulary == 400 and tokens.dtype == np.uint16
    assert 100 < len(tokens) < len(text) and int(tokens.max()) < 400
    assert tokenizer.decode(tokens) == text.decode()
    assert isinstance(load_tokenizer(), ByteTokenizer)


def test_a_vocabulary_with_gaps_counts_to_its_largest_token(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 300}, unk_token="?"))
    words.save(str(tmp_path / "words.json"))
    tokenizer = FileTokenizer(tmp_path / "words.json")
    assert tokenizer.vocabulary == 301 and tokenizer.encode(b"b").tolist() == [300]
    with pytest.raises(TextError, match="refuses the text"):
        tokenizer.encode(b"c")


def test_tokenizer_errors_are_one_sentence(
    tokenizer_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TextError, match=r"not UTF-8 \(.*byte 0xff in position 2"):
        load_tokenizer(tokenizer_file).encode(b"ab\xff")
    with pytest.raises(TextError, match=r"No such file.*--tokenizer"):
        load_tokenizer(tmp_path / "missing.json")
    (tmp_path / "other.json").write_bytes(b'{"a": 1}')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    for file in ("other.json", "binary.json"):
        with pytest.raises(TextError, match="is not a tokenizer"):
            load_tokenizer(tmp_path / file)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(TextError, match="pip install tokenizers"):
        load_tokenizer(tokenizer_file)


# Reading ahead


class Numbers:
    """Counts upwards, slowly or with an accident if so wished."""

    def __init__(
        self, end: int, error: BaseException | None = None, block: threading.Event | None = None
    ) -> None:
        self.end, self.error, self.block = end, error, block
        self.made = 0

    def __iter__(self) -> Iterator[Batch]:
        while self.made < self.end:
            self.made += 1
            yield Batch(torch.tensor([[self.made]]), torch.tensor([[0]]), 0, 1)
        if self.block:
            self.block.wait()
        if self.error:
            raise self.error

    def state_dict(self) -> State:
        return {"made": self.made}


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.001)


def numbers(batches: ReadAhead) -> list[int]:
    return [int(batch.inputs) for batch in batches]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_order_end_and_depth(depth: int) -> None:
    source = Numbers(9)
    with ReadAhead(source, depth) as batches:
        wait_until(lambda: batches._ready.qsize() == depth)
        time.sleep(0.02)
        assert source.made == depth
        assert numbers(batches) == list(range(1, 10))
        assert next(batches, None) is None  # and stays at its end
    assert not batches._thread.is_alive() and batches._thread.daemon


def test_an_error_arrives_after_the_good_batches_with_its_traceback() -> None:
    with ReadAhead(Numbers(2, error=OSError("disk on fire"))) as batches:
        assert [int(next(batches).inputs), int(next(batches).inputs)] == [1, 2]
        for _ in range(2):
            with pytest.raises(OSError, match="disk on fire") as caught:
                next(batches)
            assert "raise self.error" in "".join(traceback.format_tb(caught.tb))


def test_closing_ends_a_thread_that_waits_for_room() -> None:
    full = ReadAhead(Numbers(100), depth=2)
    wait_until(lambda: full._ready.qsize() == 2)
    started = time.monotonic()
    full.close()
    full.close()
    assert not full._thread.is_alive() and time.monotonic() - started < 0.5
    with pytest.raises(RuntimeError, match=r"after close\(\)"):
        next(full)


def test_closing_wakes_a_consumer_and_does_not_wait_for_a_stuck_source() -> None:
    block = threading.Event()
    empty = ReadAhead(Numbers(0, block=block))
    raised: list[BaseException] = []

    def consume() -> None:
        try:
            next(empty)
        except RuntimeError as error:
            raised.append(error)

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    time.sleep(0.02)
    empty.close()
    consumer.join(5)
    assert raised
    block.set()
    empty._thread.join(5)
    assert not empty._thread.is_alive()


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="depth = 0"):
        ReadAhead(Numbers(1), depth=0)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            ReadAhead(Numbers(1), pin=True)


@pytest.mark.parametrize("by_length", [False, True])
# an epoch has 7 batches of sequences, 11 of documents
@pytest.mark.parametrize("used", [0, 3, 7, 11])
def test_a_restart_has_exactly_the_next_batch(by_length: bool, used: int) -> None:
    samples = many_documents() if by_length else sequences(TOKENS, T=8)
    expected = list(islice(batches_of(samples, 4, by_length=by_length), used + 10))
    with ReadAhead(batches_of(samples, 4, by_length=by_length), depth=3) as batches:
        for _, batch in zip(range(used), batches, strict=False):
            assert batch.tokens
        # it has read ahead, and the state must not show it
        wait_until(lambda: batches._ready.qsize() == 3)
        state = batches.state_dict()
    restarted = batches_of(samples, 4, by_length=by_length)
    restarted.load_state_dict(state)
    with ReadAhead(restarted) as batches:
        assert all(map(same, islice(batches, 10), expected[used:]))
