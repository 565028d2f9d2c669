"""Windows and packed documents over several ranks: the serial numbers, and only the keys that are
seen travel.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from data_parallel import largest_difference
from torch import Tensor, nn

import minidist
from minidist.full.collectives import all_reduce
from minidist.full.comm import Cluster, Communicator
from minidist.full.context import blocks, parallelize_context, shard_tokens
from minidist.full.context.context_parallel import WAYS, attend_alone
from minidist.full.context.in_sight import InSight
from minidist.full.context.order import ORDERS, positions, sight_of
from minidist.full.model import GPT, GPTConfig, Where, cross_entropy_sum
from minidist.full.model.attention import SlidingWindow, causal_attention
from minidist.full.model.seen import beginnings, first_seen
from minidist.full.recompute import recompute

SMALL = GPTConfig(
    vocabulary=23,
    layers=2,
    hidden=48,
    heads=12,
    key_value_heads=6,
    intermediate=17,
    sequence=96,
    dropout=0.1,
    tied=True,
)
TIME = 24
DOCUMENTS = torch.stack(
    [beginnings(torch.tensor(cut)) for cut in ([0, 5, 24], [0, 24], [0, 2, 12, 24])]
)
WHERE = Where(seed=3, step=5, rows=1)


def terms_of(model: GPT, tokens: Tensor, targets: Tensor, where: Where) -> dict[str, Tensor]:
    """Return the loss and all gradients."""
    loss = cross_entropy_sum(model(tokens, where), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad
    return found


def text() -> Tensor:
    return torch.randint(23, (3, TIME + 1), generator=torch.Generator().manual_seed(1))


@cache
def serial(window: int, packed: bool) -> dict[str, Tensor]:
    model, tokens = GPT(replace(SMALL, attention_window=window), dtype=torch.float64), text()
    where = replace(WHERE, documents=DOCUMENTS if packed else None)
    return terms_of(model, tokens[:, :-1], tokens[:, 1:], where)


def spread(
    comm: Communicator,
    window: int,
    packed: bool,
    way: str = "ring",
    order: str = "zigzag",
    policy: str = "none",
) -> tuple[dict[str, Tensor], int]:
    """Return the same of tokens that are spread over the ranks, and the bytes that this one sent."""
    model = GPT(replace(SMALL, attention_window=window), dtype=torch.float64)
    if policy != "none":
        recompute(model, policy)
    parallelize_context(model, comm, way, order)
    inputs, targets = (shard_tokens(part, comm, order) for part in (text()[:, :-1], text()[:, 1:]))
    where = replace(WHERE, positions=inputs[1], documents=DOCUMENTS if packed else None)
    before = comm.traffic.bytes
    found = terms_of(model, inputs[0], targets[0], where)
    sent = comm.traffic.bytes - before
    for term in found.values():
        all_reduce(term, comm)
    return found, sent


@pytest.mark.parametrize("packed", (False, True), ids=("", "packed"))
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "ranks", (*(pytest.param(each, marks=pytest.mark.soak) for each in (1, 2)), 3)
)
def test_parity(ranks: int, way: str, order: str, packed: bool) -> None:
    """With windows inside a rank's tokens, over several ranks, and as wide as the sequence."""
    for window in (0, 2, 5, 17, TIME):
        if window or packed:
            job = partial(spread, window=window, packed=packed, way=way, order=order)
            for found, _ in minidist.run(job, ranks, debug=True):
                assert largest_difference(found, serial(window, packed)) <= 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_a_window_as_wide_as_the_sequence_is_full_attention_bit_for_bit(way: str) -> None:
    """And sends the same."""
    for wide, full in zip(
        minidist.run(partial(spread, window=TIME, packed=False, way=way), 2),
        minidist.run(partial(spread, window=0, packed=False, way=way), 2),
        strict=True,
    ):
        assert all(torch.equal(wide[0][name], full[0][name]) for name in full[0])
        assert wide[1] == full[1]


# ---------------------------------------------------------------- what travels


def keys_sent(order: str, ranks: int, window: int, time: int) -> list[int]:
    """Return how many tokens each rank sends, by the formulas, for windows of at most a chunk."""
    borders = window - 1
    if order == "contiguous":
        return [borders] * (ranks - 1) + [0]
    # the end of chunk r goes to rank r + 1, that of chunk 2 P - 1 - r to rank r - 1; the two chunks
    # in the middle are of one rank, and nothing follows the last one
    return [borders * ((rank < ranks - 1) + (rank > 0)) for rank in range(ranks)]


def traffic(comm: Communicator, **how: Any) -> list[tuple[int, int]]:
    """Return the bytes and messages that this rank sends forward, and backward."""
    window, order, way = how["window"], how["order"], how["way"]
    dtype, time = how["dtype"], how["time"]
    model: Any = nn.Module()
    model.attend = SlidingWindow(window) if window else causal_attention
    parallelize_context(model, comm, way, order)
    mine = positions(order, comm.size, comm.rank, time)
    drawn = [
        torch.randn(2, heads, time, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
        for heads in (4, 2, 2)
    ]
    leaves = [part[:, :, mine].requires_grad_() for part in drawn]
    counts = [(comm.traffic.bytes, comm.traffic.messages)]
    output = model.attend(*leaves, *how.get("documents", ()))
    counts.append((comm.traffic.bytes, comm.traffic.messages))
    output.sum().backward()
    counts.append((comm.traffic.bytes, comm.traffic.messages))
    return [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(counts)]


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16), ids=str)
@pytest.mark.parametrize("order", ("contiguous", "zigzag"))
@pytest.mark.parametrize("way", ("ring", "all_gather"))
@pytest.mark.parametrize("ranks", (2, 4))
def test_bytes_and_messages_are_those_of_the_tokens_that_are_seen(
    ranks: int, way: str, order: str, dtype: torch.dtype
) -> None:
    """A rank of which nothing is seen sends nothing; in 16 bits gradients come home in 32."""
    time = 16 * ranks
    token = 2 * 2 * 2 * 8 * dtype.itemsize  # keys and values of a token: two rows, two heads
    home = token * (2 if dtype == torch.bfloat16 else 1)
    for window in (1, 2, 8):
        job = partial(traffic, window=window, order=order, way=way, time=time, dtype=dtype)
        found = minidist.run(job, ranks)
        sent = keys_sent(order, ranks, window, time)
        assert [each[0][0] for each in found] == [token * count for count in sent]
        both = sum(each[1][0] for each in found)
        assert both == sum(sent) * (token + home)
        neighbours = [0 if window == 1 else count // (window - 1) for count in sent]
        assert [each[0][1] for each in found] == neighbours
        if window > 1:
            # gradients of what a rank had: as many messages as it received
            assert sum(each[1][1] for each in found) == 2 * sum(neighbours)


@pytest.mark.parametrize("way, begun", (("ring", [1, 2, 3, 3]), ("all_gather", [3, 3, 3, 3])))
def test_a_ring_has_room_for_one_part_ahead(
    way: str, begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many parts have memory when a rank computes with its own keys, and with each other's."""
    hops: dict[int, list[int]] = defaultdict(list)
    fetch = InSight.fetch

    def counted(self: InSight, mine: Tensor, hop: int) -> Any:
        hops[self.comm.rank].append(hop)
        return fetch(self, mine, hop)

    def program(comm: Communicator) -> tuple[list[int], list[int]]:
        sight = sight_of("zigzag", 4, TIME, 5, None)
        assert sight is not None
        stream = comm.stream() if way == "ring" else None
        mine = torch.full((2, TIME // 4, 3), float(comm.rank))
        parts = InSight(comm, sight, stream).blocks(mine)
        counts = [len(hops[comm.rank]) for _ in parts]
        return counts, hops[comm.rank]

    monkeypatch.setattr(InSight, "fetch", counted)
    assert minidist.run(program, 4) == [(begun, [1, 2, 3])] * 4


@pytest.mark.parametrize("way", ("ring", "all_gather"))
def test_gradients_go_home_beside_computing_the_next(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the ring computes, begins to send and waits for, in turn; the other way sends at the end."""
    told: dict[int, list[str]] = defaultdict(list)
    begin = InSight.begin

    def noted(self: InSight, *given: Any) -> Any:
        log = told[self.comm.rank]
        log.append("send")
        arrive = begin(self, *given)

        def waited() -> Tensor:
            log.append("wait")
            return arrive()

        return waited

    def program(comm: Communicator) -> list[str]:
        sight, rank = sight_of("zigzag", 4, TIME, 5, None), comm.rank
        assert sight is not None

        def terms() -> Iterator[tuple[int, Tensor]]:
            for source in (rank, *((rank - hop) % 4 for hop in (1, 2, 3))):
                told[rank].append("term")
                tokens = TIME // 4 if source == rank else len(sight.wanted(rank, source))
                yield source, torch.ones(2, tokens, 3)

        InSight(comm, sight, comm.stream() if way == "ring" else None).home(terms())
        return told[rank]

    monkeypatch.setattr(InSight, "begin", noted)
    ahead = ["term", *["term", "send"] * 3, *["wait"] * 3]
    after = [*["term"] * 4, *["send"] * 3, *["wait"] * 3]
    assert minidist.run(program, 4) == [ahead if way == "ring" else after] * 4


def test_a_window_over_several_ranks_sends_what_each_sees() -> None:
    """Contiguous, 4 tokens a rank, 10 of a window: all of the two ranks before, and one token of
    the third.
    """
    found = minidist.run(
        partial(traffic, window=10, order="contiguous", way="ring", time=16, dtype=torch.float64),
        4,
    )
    token = 2 * 2 * 2 * 8 * 8
    assert [each[0][0] // token for each in found] == [4 + 4 + 1, 4 + 4, 4, 0]


def test_documents_that_end_where_a_rank_does_send_nothing() -> None:
    documents = beginnings(torch.tensor([0, 8, 16]))[None].expand(2, -1)
    job = partial(traffic, window=0, way="ring", time=16, dtype=torch.float64)
    apart = minidist.run(partial(job, order="contiguous", documents=(documents,)), 2)
    assert apart == [[(0, 0), (0, 0)]] * 2
    across = beginnings(torch.tensor([0, 5, 16]))[None].expand(2, -1)
    found = minidist.run(partial(job, order="contiguous", documents=(across,)), 2)
    assert found[0][0] == (3 * 2 * 2 * 2 * 8 * 8, 1)  # tokens 5, 6 and 7
    # of rows with other documents, what any of them sees
    mixed = torch.stack((documents[0], across[0]))
    assert minidist.run(partial(job, order="contiguous", documents=(mixed,)), 2) == found


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_wanted_is_what_some_query_sees(order: str) -> None:
    for window, documents in ((5, None), (0, DOCUMENTS), (7, DOCUMENTS)):
        first = first_seen(TIME, window, documents)
        sight = sight_of(order, 3, TIME, window, documents)
        assert sight is not None
        for by, source in product(range(3), repeat=2):
            queries, keys = (positions(order, 3, rank, TIME) for rank in (by, source))
            sees = (keys >= first[:, queries, None]) & (keys <= queries[:, None])
            wanted = sees.flatten(0, 1).any(0).nonzero().flatten()
            assert torch.equal(sight.wanted(by, source), wanted)
            met = sight.meeting(by, source)
            if met is None or met.seen is None:
                assert not len(wanted)
                continue
            mask = met.seen.mask(slice(0, len(queries)), slice(0, len(wanted)))
            assert torch.equal(mask, sees[:, :, wanted])
        assert sight is sight_of(order, 3, TIME, window, documents)  # for the next layer
        assert sight is not sight_of(order, 3, TIME, window, DOCUMENTS.clone())
        assert sight.wanted(2, 1) is sight.wanted(2, 1)
    assert sight_of(order, 3, TIME, 0, None) is sight_of(order, 3, TIME, TIME, None) is None


@pytest.mark.parametrize("packed", (False, True), ids=("", "packed"))
@pytest.mark.parametrize("way", WAYS)
def test_selective_recomputation_keeps_what_was_sent_for(way: str, packed: bool) -> None:
    sent = {}
    for policy in ("none", "selective", "full"):
        job = partial(spread, window=5, packed=packed, way=way, policy=policy)
        found, sent[policy] = minidist.run(job, 2)[0]
        assert largest_difference(found, serial(5, packed)) <= 1e-12
    assert sent["none"] == sent["selective"] < sent["full"]


@pytest.mark.parametrize(("way", "seconds"), [("ring", 4.0), ("all_gather", 3 * 0.9 + 4.0)])
def test_the_next_part_travels_beside_computing(
    way: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each meeting takes a second, and each part 0.9: all_gather fetches all before it computes."""
    comms: dict[int, Communicator] = {}
    plain = blocks.attend

    def timed(*inputs: Any, **how: Any) -> tuple[Tensor, Tensor]:
        comms[threading.get_ident()].advance(1.0)
        return plain(*inputs, **how)

    monkeypatch.setattr(blocks, "attend", timed)

    def program(comm: Communicator) -> float:
        comms[threading.get_ident()] = comm
        model: Any = nn.Module()
        model.attend = SlidingWindow(31)  # of 32 tokens: the last rank sees parts of all
        parallelize_context(model, comm, way, "contiguous")
        parts = [torch.randn(1, 2, 8, 8, dtype=torch.float64) for _ in range(3)]
        model.attend(*parts)
        return comm.clock()

    part = 2 * 2 * 8 * 8 * 8  # bytes of keys and values: two heads, eight tokens
    ended = minidist.run(program, 4, cluster=Cluster.uniform(0, part / 0.9))
    assert max(ended) == pytest.approx(seconds, rel=0.02)
    assert ended[0] < 1 + 3 * 0.9 + 0.1  # it sees its own tokens alone: there is nothing to merge


def test_documents_of_other_tokens_are_refused_before_anything_is_sent() -> None:
    def program(comm: Communicator, way: str) -> None:
        model: Any = nn.Module()
        model.attend = causal_attention
        parallelize_context(model, comm, way)
        parts = [torch.randn(1, 2, 8, 8) for _ in range(3)]
        sent = comm.traffic.messages
        with pytest.raises(
            ValueError,
            match=r"documents=\[1, 8\] do not say .*those of all ranks' tokens, \[1, 16\]",
        ):
            model.attend(*parts, torch.zeros(1, 8, dtype=torch.int64))
        assert comm.traffic.messages == sent

    for way in WAYS:
        minidist.run(partial(program, way=way), 2)


def test_afterwards_a_rank_attends_alone_within_its_window() -> None:
    def program(comm: Communicator) -> None:
        model, tokens = GPT(replace(SMALL, attention_window=5), dtype=torch.float64), text()
        expected = model(tokens[:, :-1])
        parallelize_context(model, comm)
        attend_alone(model)
        assert torch.equal(model(tokens[:, :-1]), expected)

    minidist.run(program, 2)
