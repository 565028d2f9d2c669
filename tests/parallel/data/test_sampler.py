"""Every sample once per epoch, in one global order that no number of ranks changes; and the batches
made of them.
"""

from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from training import batches_of

from minidist.full.data.text import Samples, TextError, documents, sequences
from minidist.full.ddp.sampler import POOL, DistributedSampler, Indices, State, share
from minidist.full.trainer.batches import IGNORED, Batch, Batches

SIZES = st.integers(1, 60)
RANKS = st.integers(1, 9)
GROUPED = st.booleans()
patient = settings(deadline=None)  # where cores are shared, time says nothing


TOKENS = np.arange(1, 204)  # every token different, none of them 0


def same(a: Batch, b: Batch) -> bool:
    return torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets) and a[2:] == b[2:]


def join(parts: list[Batch]) -> Batch:
    """Put the rows of several ranks, or microbatches, together; they must follow each other."""
    rows = np.cumsum([0] + [len(part.inputs) for part in parts])
    assert [part.first_row - parts[0].first_row for part in parts] == rows[:-1].tolist()
    assert len({part.tokens for part in parts}) == 1
    inputs, targets = (
        torch.cat([part.inputs for part in parts]),
        torch.cat([part.targets for part in parts]),
    )
    return Batch(inputs, targets, parts[0].first_row, parts[0].tokens)


def many_documents() -> Samples:
    sizes = np.random.default_rng(0).integers(1, 12, 40)
    return documents([np.arange(size) + 100 * number for number, size in enumerate(sizes)], T=8)


def random_lengths(length: int, seed: int = 0) -> Indices:
    return np.random.default_rng(seed).integers(1, 100, length)


def samplers(
    length: int, ranks: int, batch: int, grouped: bool = False
) -> list[DistributedSampler]:
    lengths = random_lengths(length) if grouped else None
    return [
        DistributedSampler(length, ranks, rank, seed=3, batch=batch, lengths=lengths)
        for rank in range(ranks)
    ]


def deal(ranks: list[DistributedSampler]) -> list[list[int]]:
    """Return what is left of the epoch: each global batch, put together from the shares of the
    ranks.
    """
    return [list(chain(*shares)) for shares in zip(*ranks, strict=True)]


@patient
@given(rows=st.integers(0, 60), ranks=RANKS)
def test_a_share_is_the_cut_of_array_split(rows: int, ranks: int) -> None:
    for rank, expected in enumerate(np.array_split(np.arange(rows), ranks)):
        assert np.arange(rows)[share(rows, ranks, rank)].tolist() == expected.tolist()


@patient
@given(length=SIZES, ranks=RANKS, batch=SIZES, grouped=GROUPED)
def test_every_sample_is_dealt_once_in_every_epoch(
    length: int, ranks: int, batch: int, grouped: bool
) -> None:
    group = samplers(length, ranks, batch, grouped)
    for _ in range(2):
        batches = deal(group)
        assert len(batches) == len(group[0])
        assert [len(each) for each in batches[:-1]] == [batch] * (len(batches) - 1)
        assert sorted(chain(*batches)) == list(range(length))


@patient
@given(length=SIZES, ranks=RANKS, grouped=GROUPED)
def test_ranks_differ_by_at_most_one_sample(length: int, ranks: int, grouped: bool) -> None:
    for batch in (ranks, 3 * ranks):
        counts = [sum(map(len, sampler)) for sampler in samplers(length, ranks, batch, grouped)]
        assert max(counts) - min(counts) <= 1


@patient
@given(length=SIZES, ranks=RANKS, batch=SIZES, grouped=GROUPED)
def test_the_global_batches_do_not_depend_on_the_number_of_ranks(
    length: int, ranks: int, batch: int, grouped: bool
) -> None:
    assert deal(samplers(length, ranks, batch, grouped)) == deal(
        samplers(length, 1, batch, grouped)
    )


@patient
@given(length=SIZES, ranks=RANKS, other=RANKS, batch=SIZES, grouped=GROUPED, data=st.data())
def test_a_restart_continues_exactly_on_any_number_of_ranks(
    length: int, ranks: int, other: int, batch: int, grouped: bool, data: st.DataObject
) -> None:
    whole = samplers(length, 1, batch, grouped)
    expected = [deal(whole) for _ in range(3)]
    used = data.draw(st.integers(1, 2 * len(expected[0])))

    states: list[State] = []
    for sampler in samplers(length, ranks, batch, grouped):
        for _ in islice((mine for _ in range(3) for mine in sampler), used):
            pass
        states.append(sampler.state_dict())
    assert states == [states[0]] * ranks

    restarted = samplers(length, other, batch, grouped)
    for sampler in restarted:
        sampler.load_state_dict(states[0])
    assert (
        deal(restarted)
        == list(chain(*expected))[used : (used // len(expected[0]) + 1) * len(expected[0])]
    )


@patient
@given(length=SIZES, batch=SIZES, other=SIZES)
def test_a_restart_with_another_batch_size_loses_nothing(
    length: int, batch: int, other: int
) -> None:
    before, after = samplers(length, 1, batch)[0], samplers(length, 1, other)[0]
    seen = [] if len(before) == 1 else next(iter(before))
    after.load_state_dict(before.state_dict())
    assert sorted(chain(seen, *deal([after]))) == list(range(length))


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return np.concatenate(
            DistributedSampler(50, batch=8, seed=seed).epoch_batches(epoch)
        ).tolist()  # type: ignore[no-any-return]

    assert order(1, 4) == order(1, 4)
    different = [order(seed, epoch) for seed in range(3) for epoch in range(3)]
    assert len({tuple(each) for each in different}) == 9
    assert order(0, 0) != list(range(50))


def test_every_epoch_has_another_order_without_being_told() -> None:
    group = samplers(20, 2, 4)
    assert deal(group) != deal(group)
    assert group[0].epoch == 2


def test_without_shuffling_the_order_is_that_of_the_samples() -> None:
    sampler = DistributedSampler(7, batch=3, shuffle=False)
    assert list(sampler) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(sampler) == [[0, 1, 2], [3, 4, 5], [6]]


def test_by_default_every_rank_has_a_sample_of_each_batch() -> None:
    assert [len(mine) for mine in DistributedSampler(6, ranks=3, rank=2)] == [1, 1]
    for length in range(1, 40):
        for ranks in range(1, length + 1):
            sampler = DistributedSampler(length, ranks, ranks - 1)  # whose share is the smallest
            batches = list(DataLoader(range(length), batch_sampler=sampler))  # type: ignore[arg-type]
            assert len(batches) == len(sampler)
    with pytest.raises(ValueError, match="length = 2 samples for 3 ranks: some would have none"):
        DistributedSampler(2, ranks=3)


def test_grouping_by_length_saves_padding_and_still_mixes() -> None:
    lengths = random_lengths(3 * POOL * 8 + 5)

    def padding(batches: list[Indices]) -> int:
        return sum(int((lengths[batch].max() - lengths[batch]).sum()) for batch in batches)

    sampler = DistributedSampler(len(lengths), batch=8, lengths=lengths)
    grouped = sampler.epoch_batches(0)
    assert (
        padding(grouped) < padding(DistributedSampler(len(lengths), batch=8).epoch_batches(0)) / 8
    )
    longest = [int(lengths[batch].max()) for batch in grouped]
    assert 0.3 < np.mean(np.diff(longest) > 0) < 0.7, "batches come sorted from short to long"
    assert {frozenset(batch.tolist()) for batch in grouped} != {
        frozenset(batch.tolist()) for batch in sampler.epoch_batches(1)
    }, "the same samples meet again in the next epoch"


def test_it_serves_a_torch_loader_as_batch_sampler() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10))
    loader = DataLoader(data, batch_sampler=DistributedSampler(10, 2, 1, batch=4))
    sampler = DistributedSampler(10, 2, 1, batch=4)
    assert [batch.tolist() for (batch,) in loader] == list(sampler)


def test_a_state_of_another_order_is_refused() -> None:
    state = DistributedSampler(10, seed=1, batch=2).state_dict()
    for other in (
        DistributedSampler(11, seed=1),
        DistributedSampler(10, seed=2),
        DistributedSampler(10, shuffle=False),
    ):
        with pytest.raises(ValueError, match="lost and others repeated"):
            other.load_state_dict(state)
    grouped = DistributedSampler(10, seed=1, batch=2, lengths=random_lengths(10))
    with pytest.raises(ValueError, match=r"'grouped': 2.*'grouped': 5"):
        DistributedSampler(10, seed=1, batch=5, lengths=random_lengths(10)).load_state_dict(
            grouped.state_dict()
        )


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="length = 0"):
        DistributedSampler(0)
    with pytest.raises(ValueError, match="batch = 0"):
        DistributedSampler(5, batch=0)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank = {rank} of 2 ranks"):
            DistributedSampler(5, ranks=2, rank=rank)
    with pytest.raises(ValueError, match="seed = -1"):
        DistributedSampler(5, seed=-1)
    with pytest.raises(ValueError, match="4 lengths were given for 5 samples"):
        DistributedSampler(5, lengths=random_lengths(4))


# The batches made of them


def test_targets_are_the_inputs_one_later_and_every_token_is_one_once() -> None:
    batches = list(batches_of(sequences(TOKENS, T=8), batch=4).epoch())
    whole = torch.cat([torch.cat([batch.inputs[:, :1], batch.targets], dim=1) for batch in batches])
    assert whole.dtype == torch.int64 and whole.shape == (25, 9)
    assert torch.equal(
        whole, torch.cat([torch.cat([b.inputs, b.targets[:, -1:]], dim=1) for b in batches])
    )
    # 202 and 203 are the rest
    assert sorted(whole[:, 1:].flatten().tolist()) == list(range(2, 202))
    assert [batch.tokens for batch in batches] == [32] * 6 + [8]


@pytest.mark.parametrize("ranks", [2, 3, 5, 7])
@pytest.mark.parametrize("by_length", [False, True])
def test_the_ranks_together_have_the_serial_batch(ranks: int, by_length: bool) -> None:
    samples = many_documents() if by_length else sequences(TOKENS, T=8)
    serial = batches_of(samples, 6, by_length=by_length)
    parts = [batches_of(samples, 6, ranks, rank, by_length=by_length) for rank in range(ranks)]
    for whole, *mine in islice(zip(serial, *parts, strict=True), 12):
        assert same(join(list(mine)), whole)


@pytest.mark.parametrize("packed", [False, True])
def test_a_rank_reads_its_own_rows_and_no_others(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch that is cut afterwards, they would be the same."""
    samples = many_documents().packed(12) if packed else many_documents()
    read: list[int] = []
    plain = type(samples).filled

    def noted(self: Any, indices: Indices, *more: int) -> Any:
        read.append(len(indices))
        return plain(self, indices, *more)

    monkeypatch.setattr(type(samples), "filled", noted)
    sampler = DistributedSampler(len(samples), 3, 1, batch=6)
    batches = list(Batches(samples, sampler).epoch())
    assert read == [len(batch.inputs) for batch in batches]
    assert set(read[:-1]) == {2}


def test_microbatches_are_the_batch_cut_up() -> None:
    batch = next(batches_of(sequences(TOKENS, T=8), batch=10, ranks=2, rank=1).epoch())
    for count in (1, 2, 3, 5, 7):
        parts = batch.microbatches(count)
        assert len(parts) == count and same(join(parts), batch)
    assert batch.first_row == 5


def test_documents_are_padded_and_padding_does_not_count() -> None:
    samples = documents([np.array([1, 2, 3]), np.array([9]), np.array([4, 5, 6, 7, 8, 9])], T=4)
    (batch,) = batches_of(samples, batch=3, shuffle=False).epoch()
    assert batch.inputs.tolist() == [[1, 2, 3, 0], [4, 5, 6, 7], [8, 9, 0, 0]]
    pad = IGNORED
    assert batch.targets.tolist() == [[2, 3, pad, pad], [5, 6, 7, 8], [9, pad, pad, pad]]
    assert batch.tokens == 7
    logits = torch.randn(3, 10, 4)
    mean = torch.nn.functional.cross_entropy(logits, batch.targets)
    total = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="sum")
    assert torch.allclose(total / batch.tokens, mean)


def test_grouping_documents_by_length_saves_padding() -> None:
    padded = [
        sum(
            batch.inputs.numel() - batch.tokens
            for batch in batches_of(many_documents(), 4, by_length=grouped).epoch()
        )
        for grouped in (False, True)
    ]
    assert padded[1] < padded[0] / 3


def test_measuring_does_not_move_the_position() -> None:
    batches = batches_of(sequences(TOKENS, T=8), batch=4)
    before = batches.state_dict()
    assert all(map(same, batches.epoch(), batches.epoch()))
    assert batches.state_dict() == before


def test_a_position_in_another_text_is_refused() -> None:
    state = batches_of(sequences(TOKENS, T=8), 4).state_dict()
    for other in (sequences(TOKENS + 1, T=8), sequences(TOKENS, T=7)):
        with pytest.raises(TextError, match="belongs to other samples"):
            batches_of(other, 4).load_state_dict(state)
