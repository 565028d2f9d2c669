"""`--pack`: rows of documents, of which each is trained on as if it were alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from training import metrics, same_bits, short_text, train_on

from minidist.full.context.order import positions
from minidist.full.data.options import DataOptions
from minidist.full.data.packed import Packed, pack
from minidist.full.data.text import TextError, documents, read_corpus
from minidist.full.ddp.sampler import DistributedSampler
from minidist.full.model import GPT, GPTConfig, Where, cross_entropy_sum
from minidist.full.trainer.batches import IGNORED, Batch, Batches
from minidist.full.trainer.config import ConfigError
from minidist.further import parse

WIDTH = 16
CONFIG = GPTConfig(vocabulary=50, layers=2, hidden=32, heads=4, sequence=WIDTH)


def texts(count: int = 40) -> list[Any]:
    """Return documents of all lengths, some longer than a row and some without a target."""
    generator = np.random.default_rng(0)
    lengths = [0, 1, 40, 17, 16, 2, *generator.integers(1, 14, count)]
    return [generator.integers(0, 50, length) for length in lengths]


# ---------------------------------------------------------------- rows


@given(st.lists(st.integers(1, 12)), st.integers(12, 20))
def test_each_document_is_in_one_row_and_none_is_too_long(sizes: list[int], width: int) -> None:
    rows = pack(np.array(sizes, np.int64), width)
    assert sorted(document for row in rows for document in row) == list(range(len(sizes)))
    filled = [sum(sizes[document] for document in row) for row in rows]
    assert all(0 < total <= width for total in filled)
    # two half-empty rows would have been one
    assert sum(2 * total <= width for total in filled) <= 1


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [
        ([8, 8, 8, 8], 2),
        ([5, 5, 6, 10, 6, 11, 5], 3),  # next fit, in their order, takes 4
        ([16, 1, 15, 2, 14], 3),
        ([9, 9, 9], 3),
    ],
)
def test_rows_are_as_few_as_can_be(sizes: list[int], rows: int) -> None:
    assert len(pack(np.array(sizes), 16)) == rows


def test_a_document_goes_where_it_leaves_the_least_room() -> None:
    assert sorted(pack(np.array([9, 12, 4]), 16)) == [[0], [1, 2]]  # 4, and not the 7 beside 9
    assert sorted(pack(np.array([12, 10, 4, 6, 3]), 16)) == [[0, 2], [1, 3], [4]]


def test_rows_hold_documents_side_by_side_and_no_target_crosses_a_border() -> None:
    """Inputs leave out a document's last token, and targets its first."""
    given_texts = texts()
    samples = documents(given_texts, WIDTH)
    packed = samples.packed(WIDTH)
    rows = packed.filled(np.arange(len(packed)), WIDTH, IGNORED)
    assert rows.documents is not None
    found = []
    for row, members in enumerate(packed.members):
        borders = np.unique(rows.documents[row])
        assert len(borders) - len(members) in (0, 1)  # padding begins something of its own
        for begin, document in zip(borders, members, strict=False):
            mine = rows.documents[row] == begin
            inputs, targets = rows.inputs[row][mine], rows.targets[row][mine]
            first, size = packed.starts[document], packed.sizes[document]
            assert [*inputs, targets[-1]] == list(packed.tokens[first : first + size])
            assert list(inputs[1:]) == list(targets[:-1])
            found.append(document)
        end = packed.lengths[row] - 1
        assert (rows.targets[row][end:] == IGNORED).all() and IGNORED not in rows.targets[row][:end]
    assert sorted(found) == list(range(len(samples)))


def test_padding_is_counted() -> None:
    """By the targets that do not count, packed and one a row; what is saved is the difference."""
    samples = documents(texts(), WIDTH)
    packed = samples.packed(WIDTH)
    both = [
        int((each.filled(np.arange(len(each)), WIDTH, IGNORED).targets == IGNORED).sum())
        for each in (packed, samples)
    ]
    assert packed.padding == both[0] and packed.padding + packed.saved == both[1]
    assert both[0] < 0.05 * len(packed) * WIDTH < 0.3 * len(samples) * WIDTH < both[1]
    assert packed.words(WIDTH) == (
        f"{len(samples)} documents packed into {len(packed)} rows of up to 16 tokens, with "
        f"{both[0]} tokens of padding in place of {both[1]}"
    )


def test_a_text_without_a_target_is_refused() -> None:
    with pytest.raises(TextError, match="none with two tokens or more"):
        documents([np.zeros(1, np.int64)] * 3, WIDTH).packed(WIDTH)


def batches(packed: Packed, ranks: int = 1, rank: int = 0, **how: Any) -> Batches:
    return Batches(packed, DistributedSampler(len(packed), ranks, rank, batch=5), **how)


def test_ranks_and_microbatches_have_the_documents_of_their_rows() -> None:
    packed = documents(texts(), WIDTH).packed(WIDTH)
    (whole, *_), (first, *_), (second, *_) = (
        list(batches(packed, ranks, rank).first(2)) for ranks, rank in ((1, 0), (2, 0), (2, 1))
    )
    for name in ("inputs", "targets", "documents"):
        parts = [getattr(part, name) for part in (first, second)]
        assert torch.equal(torch.cat(parts), getattr(whole, name))
        small = [getattr(part, name) for part in whole.microbatches(3)]
        assert torch.equal(torch.cat(small), getattr(whole, name))
    assert int((whole.targets != IGNORED).sum()) == whole.tokens == first.tokens
    assert whole.to("cpu").documents is whole.documents


def test_a_rank_with_some_columns_knows_where_all_documents_begin() -> None:
    packed = documents(texts(), WIDTH).packed(WIDTH)
    (whole,) = batches(packed, multiple=4).first(1)
    for rank in range(2):
        (mine,) = batches(
            packed, multiple=4, columns=lambda time, rank=rank: positions("zigzag", 2, rank, time)
        ).first(1)
        assert torch.equal(mine.inputs, whole.inputs[:, mine.positions])
        assert mine.documents is not None and torch.equal(mine.documents, whole.documents)


# ---------------------------------------------------------------- what is trained


def terms_of(model: GPT, parts: list[Batch]) -> list[Tensor]:
    """Return the sum of losses, and its gradients."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        where = Where(rows=part.first_row, positions=part.positions, documents=part.documents)
        loss = cross_entropy_sum(model(part.inputs, where), part.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [total, *(gradient.clone() for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("window", (0, 3))
def test_packed_rows_train_as_their_documents_one_by_one(window: int) -> None:
    """Loss and gradients of an epoch, in float64."""
    model = GPT(GPTConfig(**{**vars(CONFIG), "attention_window": window}), dtype=torch.float64)
    samples = documents(texts(), WIDTH)
    alone = Batches(samples, DistributedSampler(len(samples), 1, 0, batch=1))
    right = terms_of(model, list(alone.epoch()))
    found = terms_of(model, list(batches(samples.packed(WIDTH)).epoch()))
    for mine, other in zip(found, right, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
    joined = [part._replace(documents=None) for part in batches(samples.packed(WIDTH)).epoch()]
    assert abs(float(terms_of(model, joined)[0] - right[0])) > 1e-3  # as one document a row


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, "--dp 2 --zero 3 --accumulate 2"),
        (2, "--cp 2 --recompute selective"),
        (3, "--cp 3 --cp-comm all_gather --cp-order striped --sequence 30 --dropout 0.2"),
        (4, "--cp 2 --tp 2 --sp --cp-comm ulysses --heads 4 --attention-window 5"),
        (4, "--cp 2 --pp 2 --microbatches 3 --recompute full --dropout 0.2 --batch 7"),
    ],
)
def test_every_layout_trains_as_one_rank(ranks: int, words: str, tmp_path: Path) -> None:
    data = f"--pack --text {short_text(tmp_path, 4000)} --held-out 0.1"
    assert train_on(ranks, data, "--layers 2 --steps 3 --eval-every 2 --verify", words) == 0


def test_what_is_measured_is_the_loss_of_each_document_alone(tmp_path: Path) -> None:
    """Packed or by length: the same documents, and the same number for a model that has not
    learned.
    """
    text = short_text(tmp_path, 4000)
    found = {}
    for way in ("--pack", "--by-length"):
        folder = tmp_path / way.strip("-")
        words = f"{way} --text {text} --held-out 0.4 --lr 1e-12 --steps 1 --eval-every 1"
        assert train_on(1, words, f"--precision float64 --metrics {folder}.jsonl") == 0
        found[way] = metrics(Path(f"{folder}.jsonl"))[-1]["eval_loss"]
    assert found["--pack"] == pytest.approx(found["--by-length"], rel=1e-9)


def test_a_resumed_run_ends_with_the_same_bits_and_not_unpacked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--pack --text {short_text(tmp_path, 4000)} --save-every 1 --keep 9 --dropout 0.1"
    assert train_on(1, words, f"--steps 4 --save {tmp_path / 'whole'}") == 0
    said = capsys.readouterr().out
    told = re.search(
        r"([\d,]+) documents packed into ([\d,]+) rows of up to 16 tokens, with ([\d,]+) tokens of "
        r"padding in place of ([\d,]+)",
        said,
    )
    assert told is not None
    count, rows, padding, more = (int(number.replace(",", "")) for number in told.groups())
    corpus = read_corpus(DataOptions(text=(str(tmp_path / "short.txt"),), sequence=16, pack=True))
    assert isinstance(corpus.samples, Packed)
    assert (count, rows) == (len(corpus.samples.sizes), len(corpus.samples))
    assert padding == corpus.samples.padding and more - padding == (count - rows) * 16
    part = f"{words} --save {tmp_path / 'part'}"
    assert train_on(1, part, "--steps 2") == 0
    assert train_on(2, part, "--steps 4 --resume", "--cp 2") == 0
    assert train_on(1, part.replace("--pack", "--by-length"), "--steps 5 --resume") == 2
    assert "other samples" in capsys.readouterr().err
    assert train_on(1, words, f"--steps 2 --save {tmp_path / 'again'}") == 0
    assert train_on(1, words, f"--steps 4 --resume --save {tmp_path / 'again'}") == 0
    last = "step-00000004"
    assert same_bits(tmp_path / "whole" / last, tmp_path / "again" / last)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--pack --by-length", "--pack and --by-length both say which paragraphs go together"),
        ("--pack --experts 4", "--pack packs paragraphs into rows, of which --experts 4 would"),
    ],
)
def test_what_does_not_go_together_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"{sentence}.*: leave one of them out"):
        parse(words.split())
