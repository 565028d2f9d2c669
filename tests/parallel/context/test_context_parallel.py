"""Context parallelism: the serial numbers, the bytes of the formulas, even work, and fewer activations."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from data_parallel import largest_difference
from layouts import Case, worst
from torch import Tensor, nn

import minidist
from minidist.collectives import all_reduce
from minidist.comm import Cluster, Communicator
from minidist.memory.account import Account
from minidist.memory.recompute import recompute
from minidist.mesh import Layout
from minidist.model import GPT, GPTConfig, Where, cross_entropy_sum
from minidist.parallel.context import blocks, context_parallel
from minidist.parallel.context.blocks import before_any, meet
from minidist.parallel.context.context_parallel import WAYS, parallelize_context, shard_tokens
from minidist.parallel.context.flash import attend
from minidist.parallel.context.order import ORDERS, Meeting, meeting, multiple, pairs, positions
from minidist.parallel.context.plain import PlainRingAttention
from minidist.parallel.recipe import Recipe

SMALL = GPTConfig(
    vocabulary=23,
    layers=2,
    hidden=48,
    heads=24,
    key_value_heads=12,
    intermediate=17,
    sequence=96,
    dropout=0.1,
    tied=True,
)
WHERE = Where(seed=3, step=5, rows=1)


def text(time: int, config: GPTConfig = SMALL) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [3, T] of rows that end at different places."""
    tokens = torch.randint(config.vocabulary, (3, time + 1), generator=torch.Generator().manual_seed(time))
    targets = tokens[:, 1:].clone()
    targets[1, time // 2 :] = targets[2, 1:] = -100
    return tokens[:, :-1], targets


@cache
def serial(time: int, config: GPTConfig = SMALL) -> dict[str, Tensor]:
    """Return the loss and all gradients of the model on one rank."""
    model, (inputs, targets) = GPT(config, dtype=torch.float64), text(time, config)
    loss = cross_entropy_sum(model(inputs, WHERE), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return {"loss": loss.detach()} | {name: gradient(parameter) for name, parameter in model.named_parameters()}


def spread(
    comm: Communicator, time: int, way: str = "ring", order: str = "zigzag", policy: str = "none", lies: str = ""
) -> dict[str, Tensor]:
    """Return the same, of a model whose tokens are spread over the ranks; they think that they have those of `lies`."""
    model, (inputs, targets) = GPT(SMALL, dtype=torch.float64), text(time)
    if policy != "none":
        recompute(model, policy)
    parallelize_context(model, comm, way, order)
    mine, where = shard_tokens(inputs, comm, order)
    where = positions(lies or order, comm.size, comm.rank, time)
    found = model(mine, replace(WHERE, positions=where))
    loss = cross_entropy_sum(found, shard_tokens(targets, comm, order)[0])
    loss.backward()  # type: ignore[no-untyped-call]
    terms = {"loss": loss.detach()} | {name: gradient(parameter) for name, parameter in model.named_parameters()}
    for term in terms.values():
        all_reduce(term, comm)
    return terms


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


# ---------------------------------------------------------------- the serial numbers


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
def test_parity(ranks: int, way: str, order: str) -> None:
    """With as few tokens as can be, so that striped ranks have one each and rows that see no other; and with more."""
    for time in (multiple(order, ranks), 24):
        for found in minidist.run(partial(spread, time=time, way=way, order=order), ranks, debug=True):
            assert largest_difference(found, serial(time)) <= 1e-9


def test_heads_beside_adapters_are_counted() -> None:
    """Ulysses asks a layer how many heads it makes; with adapters, that is the layer beside them."""
    assert worst(Case(Layout(cp=2), Recipe(lora=2, cp_comm="ulysses"), frozen=())) <= 1e-9


@pytest.mark.parametrize(
    ("order", "lies"), [("zigzag", "contiguous"), ("striped", "contiguous"), ("zigzag", "striped")]
)
def test_with_the_positions_of_another_order_it_is_another_model(order: str, lies: str) -> None:
    found = minidist.run(lambda comm: spread(comm, 24, order=order, lies=lies), 2)
    assert largest_difference(found[0], serial(24)) > 1e-3


def test_attention_in_another_order_than_the_tokens_lie_in_is_wrong() -> None:
    def program(comm: Communicator) -> float:
        whole = drawn(12)
        mine = [part[:, :, positions("zigzag", 2, comm.rank, 12)] for part in whole]
        model = holder()
        parallelize_context(model, comm, "all_gather", "contiguous")
        right = reference(*whole)[:, :, positions("zigzag", 2, comm.rank, 12)]
        return float((model.attend(*mine) - right).abs().max())

    assert max(minidist.run(program, 2)) > 1e-2


def drawn(time: int, heads: int = 4, groups: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return query, key and value of the whole sequence, in a memory order that is not theirs."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, time, heads, 8), (2, time, groups, 8), (2, time, groups, 8)]
    return [torch.randn(shape, generator=generator, dtype=dtype).transpose(1, 2) for shape in shapes]


def reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def holder() -> Any:
    """Return a model that is nothing but a function `attend`."""
    model: Any = nn.Module()
    model.attend = reference
    return model


@pytest.mark.parametrize("order", ORDERS)
def test_scores_a_thousand_times_as_large_neither_overflow_nor_lose_digits(order: str) -> None:
    def program(comm: Communicator) -> None:
        query, key, value = drawn(8)
        whole = [query * 1000, key, value]
        mine = [part[:, :, positions(order, 4, comm.rank, 8)].requires_grad_() for part in whole]
        model = holder()
        parallelize_context(model, comm, "ring", order)
        output = model.attend(*mine)
        torch.testing.assert_close(output, reference(*whole)[:, :, positions(order, 4, comm.rank, 8)])
        output.sum().backward()
        assert all(bool(part.grad.isfinite().all()) for part in mine)

    minidist.run(program, 4)


def test_the_plain_page_is_a_ring_in_contiguous_order() -> None:
    """The same numbers and messages, in forward and backward."""

    def program(comm: Communicator) -> None:
        mine = [part[:, :, positions("contiguous", 3, comm.rank, 12)].requires_grad_() for part in drawn(12)]
        plain = PlainRingAttention.apply(*mine, comm)
        wanted = torch.autograd.grad(plain.square().sum(), mine)
        sent = (comm.traffic.messages_sent, comm.traffic.bytes_sent)
        model = holder()
        parallelize_context(model, comm, "ring", "contiguous")
        output = model.attend(*mine)
        found = torch.autograd.grad(output.square().sum(), mine)
        assert torch.equal(output, plain) and all(map(torch.equal, found, wanted))
        assert (comm.traffic.messages_sent, comm.traffic.bytes_sent) == (2 * sent[0], 2 * sent[1])

    minidist.run(program, 3)


def test_under_autocast_it_computes_in_16_bits_as_attention_does() -> None:
    def program(comm: Communicator) -> None:
        for way in WAYS:
            model = holder()
            parallelize_context(model, comm, way)
            query, key, value = (
                part[:, :, positions("zigzag", 2, comm.rank, 8)] for part in drawn(8, dtype=torch.float32)
            )
            with torch.autocast("cpu", torch.bfloat16):
                assert model.attend(query, key, value.bfloat16()).dtype == torch.bfloat16

    minidist.run(program, 2)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_merging_adds_no_error_however_many_blocks_there_are(dtype: torch.dtype) -> None:
    """Of the output, relative to that in float64; one kernel over all keys rounds it once."""
    query, key, value = (part.to(dtype) for part in drawn(1024, heads=2, groups=2))
    exact = reference(query.double(), key.double(), value.double())

    def error(output: Tensor) -> float:
        return float((output.to(dtype).double() - exact).norm() / exact.norm())

    at_once = error(attend(query, key, value, True)[0])
    for ranks in (2, 4, 8, 16, 32):
        time = 1024 // ranks
        cut = [torch.stack((key, value))[..., rank * time : (rank + 1) * time, :] for rank in range(ranks)]
        outputs = []
        for rank in range(ranks):
            mine = before_any(query[:, :, rank * time : (rank + 1) * time])
            for source in range(rank, -1, -1):
                meet(mine, cut[source], Meeting(causal=source == rank))
            outputs.append(mine.output)
        assert error(torch.cat(outputs, dim=2)) <= 1.05 * at_once


# ---------------------------------------------------------------- bytes, messages, work, memory


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
@pytest.mark.parametrize("groups", (1, 2, 8))
@pytest.mark.parametrize("ranks", (2, 4, 8))
def test_bytes_and_messages_are_those_of_the_formulas(ranks: int, groups: int, dtype: torch.dtype) -> None:
    """Keys and values are not repeated for grouped heads; in 16 bits, sums of gradients travel in 32."""
    time, heads = 2 * ranks, 8

    def program(comm: Communicator) -> None:
        tokens = 2 * time // ranks * 8 * dtype.itemsize  # bytes of a head of this rank
        n, m = 2 * groups * tokens, 2 * groups * tokens * (2 if dtype == torch.bfloat16 else 1)
        shared = max(groups, ranks)  # heads of keys and values that Ulysses sends
        u = (ranks - 1) * (2 * heads + 2 * shared) * tokens // ranks
        forward = {"ring": (ranks - 1) * n, "all_gather": (ranks - 1) * n, "ulysses": u}
        backward = {"ring": (ranks - 1) * n + ranks * m, "all_gather": (ranks - 1) * (n + m), "ulysses": u}
        for way in WAYS:
            model = holder()
            parallelize_context(model, comm, way)
            mine = [
                part[:, :, positions("zigzag", ranks, comm.rank, time)] for part in drawn(time, heads, groups, dtype)
            ]
            before = comm.traffic.bytes_sent, comm.traffic.messages_sent
            output = model.attend(*(part.requires_grad_() for part in mine))
            after = comm.traffic.bytes_sent, comm.traffic.messages_sent
            output.sum().backward()
            assert after[0] - before[0] == forward[way], way
            assert comm.traffic.bytes_sent - after[0] == backward[way], way
            if way == "ring":
                assert (after[1] - before[1], comm.traffic.messages_sent - after[1]) == (ranks - 1, 2 * ranks - 1)

    minidist.run(program, ranks)


def second_by_block(monkeypatch: pytest.MonkeyPatch, time: int) -> tuple[dict[int, Communicator], dict[int, float]]:
    """Have a block of scores, `time` by `time`, take a second of the thread's communicator; return what each did."""
    comms: dict[int, Communicator] = {}
    work: dict[int, float] = {}
    plain = blocks.attend

    def timed(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        comm = comms[threading.get_ident()]
        seconds = query.shape[2] * key.shape[2] / (2 if causal else 1) / time**2
        work[comm.rank] = work.get(comm.rank, 0.0) + seconds
        comm.advance(seconds)
        return plain(query, key, value, causal)

    monkeypatch.setattr(blocks, "attend", timed)
    return comms, work


@pytest.mark.parametrize("way", ("ring", "all_gather"))
@pytest.mark.parametrize(("ranks", "ratio"), [(2, 1.5), (4, 1.75), (8, 1.875)])
def test_the_slowest_rank_computes_what_the_order_says(
    ranks: int, ratio: float, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(2 P - 1)/P of the mean in contiguous order, all the same in zigzag order: by count, and by the virtual clock."""
    for order, expected in (("contiguous", ratio), ("zigzag", 1.0)):
        with monkeypatch.context() as patch:
            comms, work = second_by_block(patch, time=4)

            def program(comm: Communicator, order: str, comms: dict[int, Communicator]) -> float:
                comms[threading.get_ident()] = comm
                model = holder()
                parallelize_context(model, comm, way, order)
                mine = [part[:, :, positions(order, ranks, comm.rank, 4 * ranks)] for part in drawn(4 * ranks)]
                model.attend(*mine)
                return comm.clock()

            ended = minidist.run(partial(program, order=order, comms=comms), ranks, cluster=Cluster.uniform(0, 1e18))
        mean = sum(work.values()) / ranks
        assert mean == ranks / 2
        assert max(work.values()) / mean == expected
        assert max(ended) / mean == pytest.approx(expected, rel=1e-9)
        for rank in range(ranks):
            assert work[rank] == sum(pairs(meeting(order, rank, source, 4), 4) for source in range(ranks)) / 16


def test_each_hop_of_a_zigzag_ring_is_as_long_on_every_rank() -> None:
    for ranks in (2, 4, 8):
        assert {pairs(meeting("zigzag", *pair, 8), 8) for pair in product(range(ranks), repeat=2)} == {32.0}


@pytest.mark.parametrize(("way", "seconds"), [("ring", 2.0), ("plain", 3.5 + 3 * 0.4)])
def test_the_next_block_travels_beside_computing(way: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four hops of half a second, messages of 0.4 s: the plain page waits, and its last rank has 3.5 blocks."""
    ranks, time = 4, 8
    comms, _ = second_by_block(monkeypatch, time)

    def program(comm: Communicator) -> float:
        comms[threading.get_ident()] = comm
        order = "zigzag" if way == "ring" else "contiguous"
        mine = [part[:, :, positions(order, ranks, comm.rank, ranks * time)] for part in drawn(ranks * time)]
        model = holder()
        parallelize_context(model, comm, "ring", order)
        if way == "ring":
            model.attend(*mine)
        else:
            PlainRingAttention.apply(*mine, comm)
        return comm.clock()

    bytes = 2 * 2 * 2 * time * 8 * 8  # of keys and values: rows, heads, tokens, channels
    ended = max(minidist.run(program, ranks, cluster=Cluster.uniform(0, bytes / 0.4)))
    assert ended == pytest.approx(seconds, rel=1e-6)


def test_eight_ranks_hold_a_sequence_eight_times_as_long_in_the_same_bytes() -> None:
    config = replace(SMALL, heads=8, key_value_heads=8, hidden=32, sequence=512, dropout=0.0)

    def held(comm: Communicator, time: int, way: str) -> int:
        model = GPT(config)
        inputs, _ = text(time, config)
        if comm.size > 1:
            parallelize_context(model, comm, way)
        mine, where = shard_tokens(inputs, comm)
        account = Account(comm)
        account.watch(model)
        with account.recording():
            model(mine, Where(positions=where)).sum().backward()
        return account.peaks["activations"]

    alone = minidist.run(partial(held, time=32, way="ring"), 1)[0]
    for way in WAYS:
        together = max(minidist.run(partial(held, time=256, way=way), 8))
        assert together <= (1.03 if way == "ulysses" else 1) * alone, way  # which keeps the places of tokens, too


# ---------------------------------------------------------------- with recomputation, and mistakes


@pytest.mark.parametrize("way", WAYS)
def test_selective_recomputation_keeps_what_was_sent_for(way: str) -> None:
    """Output and lse stay, so no message is sent again; with `full`, those of forward are."""
    sent = {}
    for policy in ("none", "selective", "full"):

        def program(comm: Communicator, policy: str) -> int:
            before = comm.traffic.bytes_sent
            found = spread(comm, 12, way, policy=policy)
            assert largest_difference(found, serial(12)) <= 1e-9
            return comm.traffic.bytes_sent - before

        sent[policy] = minidist.run(partial(program, policy=policy), 2)[0]
    assert sent["none"] == sent["selective"] < sent["full"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"way": "rings"}, "there is no way 'rings' of context parallelism: choose one of ring, all_gather, ulysses"),
        ({"order": "random"}, "there is no order 'random' of tokens: choose one of zigzag, contiguous, striped"),
    ],
)
def test_a_mistake_is_one_sentence(words: dict[str, str], sentence: str) -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(ValueError, match=sentence):
            parallelize_context(GPT(SMALL), comm, **words)

    minidist.run(program, 2)


def test_models_and_lengths_that_cannot_be_spread_are_refused() -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(ValueError, match="Linear has none: give its attention one"):
            parallelize_context(nn.Linear(2, 2), comm)
        with pytest.raises(
            ValueError, match=r"10 tokens in a row cannot be shared out in zigzag order among 2 ranks: .* 8"
        ):
            shard_tokens(torch.zeros(1, 10), comm)
        with pytest.raises(ValueError, match="Ulysses shares 3 heads, and 3 of keys and values, out among 2 ranks"):
            parallelize_context(GPT(replace(SMALL, heads=3, key_value_heads=3)), comm, "ulysses")
        model = holder()
        parallelize_context(model, comm, "ulysses")
        with pytest.raises(ValueError, match="Ulysses shares 3 heads, and 1 of keys and values"):
            model.attend(*drawn(4, 3, 1))

    minidist.run(program, 2)


def test_afterwards_a_rank_can_attend_alone() -> None:
    def program(comm: Communicator) -> None:
        model, (inputs, _) = GPT(SMALL, dtype=torch.float64), text(24)
        expected = model(inputs)
        parallelize_context(model, comm)
        context_parallel.attend_alone(model)
        if comm.rank == 0:
            assert torch.equal(model(inputs), expected)

    minidist.run(program, 2)
