"""Context parallelism: the serial numbers, the bytes of the formulas, even work, and fewer
activations.
"""

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
from minidist.context import RingAttention
from minidist.full.collectives import all_reduce
from minidist.full.comm import Cluster, Communicator, MismatchError
from minidist.full.context import blocks, context_parallel
from minidist.full.context.blocks import before_any, meet
from minidist.full.context.context_parallel import WAYS, parallelize_context, shard_tokens
from minidist.full.context.flash import attend
from minidist.full.context.order import ORDERS, Meeting, meeting, multiple, pairs, positions
from minidist.full.memory.account import Account
from minidist.full.mesh import Layout
from minidist.full.model import GPT, GPTConfig, Where, cross_entropy_sum
from minidist.full.recompute import recompute
from minidist.further import Recipe

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
    tokens = torch.randint(
        config.vocabulary, (3, time + 1), generator=torch.Generator().manual_seed(time)
    )
    targets = tokens[:, 1:].clone()
    targets[1, time // 2 :] = targets[2, 1:] = -100
    return tokens[:, :-1], targets


@cache
def serial(time: int, config: GPTConfig = SMALL) -> dict[str, Tensor]:
    """Return the loss and all gradients of the model on one rank."""
    model, (inputs, targets) = GPT(config, dtype=torch.float64), text(time, config)
    loss = cross_entropy_sum(model(inputs, WHERE), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return {"loss": loss.detach()} | {
        name: gradient(parameter) for name, parameter in model.named_parameters()
    }


def spread(
    comm: Communicator,
    time: int,
    way: str = "ring",
    order: str = "zigzag",
    policy: str = "none",
    lies: str = "",
) -> dict[str, Tensor]:
    """Return the same, of a model whose tokens are spread over the ranks; they think that they have
    those of `lies`.
    """
    model, (inputs, targets) = GPT(SMALL, dtype=torch.float64), text(time)
    if policy != "none":
        recompute(model, policy)
    parallelize_context(model, comm, way, order)
    mine, where = shard_tokens(inputs, comm, order)
    where = positions(lies or order, comm.size, comm.rank, time)
    found = model(mine, replace(WHERE, positions=where))
    loss = cross_entropy_sum(found, shard_tokens(targets, comm, order)[0])
    loss.backward()  # type: ignore[no-untyped-call]
    terms = {"loss": loss.detach()} | {
        name: gradient(parameter) for name, parameter in model.named_parameters()
    }
    for term in terms.values():
        all_reduce(term, comm)
    return terms


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


# ---------------------------------------------------------------- the serial numbers


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", (1, 2, 3, pytest.param(4, marks=pytest.mark.soak)))
def test_parity(ranks: int, way: str, order: str) -> None:
    """With as few tokens as can be, so that striped ranks have one each and rows that see no other;
    and with more.
    """
    for time in (multiple(order, ranks), 24):
        for found in minidist.run(
            partial(spread, time=time, way=way, order=order), ranks, debug=True
        ):
            assert largest_difference(found, serial(time)) <= 1e-9


@pytest.mark.parametrize("quantised", (False, True))
def test_heads_beside_adapters_are_counted(quantised: bool) -> None:
    """Ulysses asks a layer how many heads it makes; with adapters, that is the layer beside them,
    also in 4 bits.
    """
    recipe = Recipe(lora=2, qlora=quantised, cp_comm="ulysses")
    assert worst(Case(Layout(cp=2), recipe, frozen=())) <= 1e-9


@pytest.mark.parametrize(
    ("order", "lies"), [("zigzag", "contiguous"), ("striped", "contiguous"), ("zigzag", "striped")]
)
def test_positions_of_another_order_are_refused_on_every_rank(order: str, lies: str) -> None:
    """They would make another model: each token would be rotated as if it were elsewhere."""

    def program(comm: Communicator) -> None:
        sent = comm.traffic.messages
        with pytest.raises(
            ValueError, match=rf"but in {order} order these are [\s\S]*: pass Where.positions=..."
        ):
            spread(comm, 24, order=order, lies=lies)
        assert comm.traffic.messages == sent

    minidist.run(program, 2)


@pytest.mark.parametrize("order", ORDERS)
def test_a_gpt_without_positions_is_refused(order: str) -> None:
    """On all ranks, though rank 0 has the first tokens in contiguous order. A rank that attends
    alone is not asked.
    """

    def program(comm: Communicator) -> None:
        model, (inputs, _) = GPT(SMALL), text(24)
        parallelize_context(model, comm, "ring", order)
        with pytest.raises(
            ValueError,
            match=r"the GPT was called with positions 0, .*: pass Where.positions=",
        ):
            model(shard_tokens(inputs, comm, order)[0])
        context_parallel.attend_alone(model)
        model(inputs)

    minidist.run(program, 2)


def test_attention_in_another_order_than_the_tokens_lie_in_is_wrong() -> None:
    def program(comm: Communicator) -> float:
        whole = drawn(12)
        mine = [part[:, :, positions("zigzag", 2, comm.rank, 12)] for part in whole]
        model = holder()
        parallelize_context(model, comm, "all_gather", "contiguous")
        right = reference(*whole)[:, :, positions("zigzag", 2, comm.rank, 12)]
        return float((model.attend(*mine) - right).abs().max())

    assert max(minidist.run(program, 2)) > 1e-2


def drawn(
    time: int, heads: int = 4, groups: int = 2, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Return query, key and value of the whole sequence, in a memory order that is not theirs."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, time, heads, 8), (2, time, groups, 8), (2, time, groups, 8)]
    return [
        torch.randn(shape, generator=generator, dtype=dtype).transpose(1, 2) for shape in shapes
    ]


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
        torch.testing.assert_close(
            output, reference(*whole)[:, :, positions(order, 4, comm.rank, 8)]
        )
        output.sum().backward()
        assert all(bool(part.grad.isfinite().all()) for part in mine)

    minidist.run(program, 4)


def test_the_book_is_a_ring_in_contiguous_order() -> None:
    """The same numbers and messages, in forward and backward."""

    def program(comm: Communicator) -> None:
        mine = [
            part[:, :, positions("contiguous", 3, comm.rank, 12)].requires_grad_()
            for part in drawn(12)
        ]
        book = RingAttention.apply(*mine, comm)
        wanted = torch.autograd.grad(book.square().sum(), mine)
        sent = (comm.traffic.messages, comm.traffic.bytes)
        model = holder()
        parallelize_context(model, comm, "ring", "contiguous")
        output = model.attend(*mine)
        found = torch.autograd.grad(output.square().sum(), mine)
        torch.testing.assert_close([output, *found], [book, *wanted], rtol=1e-12, atol=1e-12)
        assert (comm.traffic.messages, comm.traffic.bytes) == (2 * sent[0], 2 * sent[1])

    minidist.run(program, 3)


def test_under_autocast_it_computes_in_16_bits_as_attention_does() -> None:
    def program(comm: Communicator) -> None:
        for way in WAYS:
            model = holder()
            parallelize_context(model, comm, way)
            query, key, value = (
                part[:, :, positions("zigzag", 2, comm.rank, 8)]
                for part in drawn(8, dtype=torch.float32)
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
        cut = [
            torch.stack((key, value))[..., rank * time : (rank + 1) * time, :]
            for rank in range(ranks)
        ]
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
def test_bytes_and_messages_are_those_of_the_formulas(
    ranks: int, groups: int, dtype: torch.dtype
) -> None:
    """Keys and values are not repeated for grouped heads; in 16 bits, sums of gradients travel in
    32.
    """
    time, heads = 2 * ranks, 8

    def program(comm: Communicator) -> None:
        tokens = 2 * time // ranks * 8 * dtype.itemsize  # bytes of a head of this rank
        n, m = 2 * groups * tokens, 2 * groups * tokens * (2 if dtype == torch.bfloat16 else 1)
        shared = max(groups, ranks)  # heads of keys and values that Ulysses sends
        u = (ranks - 1) * (2 * heads + 2 * shared) * tokens // ranks
        forward = {"ring": (ranks - 1) * n, "all_gather": (ranks - 1) * n, "ulysses": u}
        backward = {
            "ring": (ranks - 1) * n + ranks * m,
            "all_gather": (ranks - 1) * (n + m),
            "ulysses": u,
        }
        for way in WAYS:
            model = holder()
            parallelize_context(model, comm, way)
            mine = [
                part[:, :, positions("zigzag", ranks, comm.rank, time)]
                for part in drawn(time, heads, groups, dtype)
            ]
            before = comm.traffic.bytes, comm.traffic.messages
            output = model.attend(*(part.requires_grad_() for part in mine))
            after = comm.traffic.bytes, comm.traffic.messages
            output.sum().backward()
            assert after[0] - before[0] == forward[way], way
            assert comm.traffic.bytes - after[0] == backward[way], way
            if way == "ring":
                assert (after[1] - before[1], comm.traffic.messages - after[1]) == (
                    ranks - 1,
                    2 * ranks - 1,
                )

    minidist.run(program, ranks)


def second_by_block(
    monkeypatch: pytest.MonkeyPatch, time: int
) -> tuple[dict[int, Communicator], dict[int, float]]:
    """Have a block of scores, `time` by `time`, take a second of the thread's communicator; return
    what each did.
    """
    comms: dict[int, Communicator] = {}
    work: dict[int, float] = {}
    plain = blocks.attend

    def timed(
        query: Tensor, key: Tensor, value: Tensor, causal: bool, **seen: Any
    ) -> tuple[Tensor, Tensor]:
        comm = comms[threading.get_ident()]
        seconds = query.shape[2] * key.shape[2] / (2 if causal else 1) / time**2
        work[comm.rank] = work.get(comm.rank, 0.0) + seconds
        comm.advance(seconds)
        return plain(query, key, value, causal, **seen)

    monkeypatch.setattr(blocks, "attend", timed)
    return comms, work


@pytest.mark.parametrize("way", ("ring", "all_gather"))
@pytest.mark.parametrize(("ranks", "ratio"), [(2, 1.5), (4, 1.75), (8, 1.875)])
def test_the_slowest_rank_computes_what_the_order_says(
    ranks: int, ratio: float, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(2 P - 1)/P of the mean in contiguous order, all the same in zigzag order: by count, and by
    the virtual clock.
    """
    for order, expected in (("contiguous", ratio), ("zigzag", 1.0)):
        with monkeypatch.context() as patch:
            comms, work = second_by_block(patch, time=4)

            def program(comm: Communicator, order: str, comms: dict[int, Communicator]) -> float:
                comms[threading.get_ident()] = comm
                model = holder()
                parallelize_context(model, comm, way, order)
                mine = [
                    part[:, :, positions(order, ranks, comm.rank, 4 * ranks)]
                    for part in drawn(4 * ranks)
                ]
                model.attend(*mine)
                return comm.clock()

            ended = minidist.run(
                partial(program, order=order, comms=comms), ranks, cluster=Cluster.uniform(0, 1e18)
            )
        mean = sum(work.values()) / ranks
        assert mean == ranks / 2
        assert max(work.values()) / mean == expected
        assert max(ended) / mean == pytest.approx(expected, rel=1e-9)
        for rank in range(ranks):
            assert (
                work[rank]
                == sum(pairs(meeting(order, rank, source, 4), 4) for source in range(ranks)) / 16
            )


def test_each_hop_of_a_zigzag_ring_is_as_long_on_every_rank() -> None:
    for ranks in (2, 4, 8):
        assert {
            pairs(meeting("zigzag", *pair, 8), 8) for pair in product(range(ranks), repeat=2)
        } == {32.0}


def test_the_next_block_travels_beside_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four hops of half a second hide messages of 0.4 s."""
    ranks, time = 4, 8
    comms, _ = second_by_block(monkeypatch, time)

    def program(comm: Communicator) -> float:
        comms[threading.get_ident()] = comm
        mine = [
            part[:, :, positions("zigzag", ranks, comm.rank, ranks * time)]
            for part in drawn(ranks * time)
        ]
        model = holder()
        parallelize_context(model, comm, "ring", "zigzag")
        model.attend(*mine)
        return comm.clock()

    bytes = 2 * 2 * 2 * time * 8 * 8  # of keys and values: rows, heads, tokens, channels
    ended = max(minidist.run(program, ranks, cluster=Cluster.uniform(0, bytes / 0.4)))
    assert ended == pytest.approx(2.0, rel=1e-6)


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
        # which keeps the places of tokens, too
        assert together <= (1.03 if way == "ulysses" else 1) * alone, way


# ---------------------------------------------------------------- with recomputation, and mistakes


@pytest.mark.parametrize("way", WAYS)
def test_selective_recomputation_keeps_what_was_sent_for(way: str) -> None:
    """Output and lse stay, so no message is sent again; with `full`, those of forward are."""
    sent = {}
    for policy in ("none", "selective", "full"):

        def program(comm: Communicator, policy: str) -> int:
            before = comm.traffic.bytes
            found = spread(comm, 12, way, policy=policy)
            assert largest_difference(found, serial(12)) <= 1e-9
            return comm.traffic.bytes - before

        sent[policy] = minidist.run(partial(program, policy=policy), 2)[0]
    assert sent["none"] == sent["selective"] < sent["full"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            {"way": "rings"},
            "there is no way 'rings' of context parallelism: choose one of ring, all_gather, "
            "ulysses",
        ),
        (
            {"order": "random"},
            "there is no order 'random' of tokens: choose one of zigzag, contiguous, striped",
        ),
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
            ValueError,
            match=r"10 tokens in a row cannot be shared out in zigzag order among 2 ranks: .* 8",
        ):
            shard_tokens(torch.zeros(1, 10), comm)
        with pytest.raises(
            ValueError, match="Ulysses shares 3 heads, and 3 of keys and values, out among 2 ranks"
        ):
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


# ---------------------------------------------------------------- the model's own `attend`


def scaled(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return reference(query * 8**0.5 * 0.3, key, value)  # for heads of 8 channels


def fixed_scale(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The right one for heads of 8 channels, and for no others."""
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True, scale=8**-0.5
    )


def masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def window(query: Tensor, key: Tensor, value: Tensor, width: int = 3) -> Tensor:
    ones = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool)
    return masked(query, key, value, ones.tril() & ones.triu(1 - width))


def wide_window(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return window(query, key, value, 700)


def two_way(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def by_distance(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    places = torch.arange(query.shape[2])
    bias = (places - places[:, None]).to(query.dtype) / 10
    return masked(query, key, value, bias.masked_fill(bias > 0, -torch.inf))


def sink(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (F.pad(part, (0, 0, 1, 0)) for part in (key, value))
    time = query.shape[2]
    return masked(query, key, value, torch.ones(time, time + 1, dtype=torch.bool).tril(1))


def gated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return reference(query, key, value).tanh()


GATE = torch.ones((), dtype=torch.float64, requires_grad=True)


def learned(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return reference(query, key, value) * GATE  # plain, until the gate has learned something


class Dropping(nn.Module):
    """Attention with dropout, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.eval()
        self.attend = self.dropping

    def dropping(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.dropout(reference(query, key, value), 0.1, self.training)


OTHERS: dict[Any, str] = {
    **dict.fromkeys((scaled, window, two_way, by_distance, sink, gated), "differs by"),
    wide_window: "has a window: the last of 1056 tokens does not see the first",
    learned: "has trained parameters of its own, which would get no gradient",
}


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: other.__name__)
def test_another_attention_is_refused_before_anything_is_sent(other: Any) -> None:
    """Ring and all_gather would compute plain causal attention in its place; Ulysses calls it."""

    def program(comm: Communicator) -> None:
        numbers = torch.get_rng_state()
        parts = drawn(1056 if other is wide_window else 12)
        places = positions("zigzag", 2, comm.rank, parts[0].shape[2])
        mine = [part[:, :, places] for part in parts]
        for way in WAYS:
            model = holder()
            model.attend = other
            parallelize_context(model, comm, way)
            if way == "ulysses":
                torch.testing.assert_close(model.attend(*mine), other(*parts)[:, :, places])
                continue
            sent = comm.traffic.messages
            for _ in range(2):
                with pytest.raises(
                    ValueError,
                    match=f"attend {OTHERS[other]}.*{way} computes plain .*use .* 'ulysses'",
                ):
                    model.attend(*mine)
            assert comm.traffic.messages == sent
        assert torch.equal(torch.get_rng_state(), numbers)

    minidist.run(program, 2)


def test_dropout_is_found_when_training_begins() -> None:
    def program(comm: Communicator) -> None:
        model = Dropping()
        parallelize_context(model, comm)
        mine = [part[:, :, :2] for part in drawn(4)]
        model.attend(*mine)  # In evaluation it is plain.
        with pytest.raises(ValueError, match="attend differs by"):
            model.train().attend(*mine)

    minidist.run(
        program, 2, torch=True
    )  # ranks that drew from one generator could disturb each other


def test_a_fixed_scale_is_right_for_one_number_of_channels() -> None:
    def program(comm: Communicator) -> None:
        for channels in (8, 16):
            model = holder()
            model.attend = fixed_scale
            parallelize_context(model, comm)
            mine = [torch.randn(1, 2, 4, channels, dtype=torch.float64) for _ in range(3)]
            if channels == 8:
                model.attend(*mine)
                continue
            with pytest.raises(ValueError, match="differs by"):
                model.attend(*mine)

    minidist.run(program, 2)


def in_few_bits(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A kernel that takes nothing but 16 bits, three queries a key, and computes in float32."""
    assert query.dtype == torch.bfloat16 and query.shape[1] == 3 * key.shape[1]
    return reference(query.float(), key.float(), value.float()).bfloat16()


def test_plain_attention_in_other_words_is_taken() -> None:
    """One that repeats heads by a number of its own, computes in 32 bits, or takes 16 bits only."""

    def repeated(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (part.repeat_interleave(4, 1) for part in (key, value))
        scores = (query @ key.mT / query.shape[-1] ** 0.5).float()
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -torch.inf).softmax(-1).to(value.dtype) @ value

    def program(comm: Communicator) -> None:
        model = holder()
        model.attend = repeated
        parallelize_context(model, comm)
        model.attend(*(part[:, :, :2] for part in drawn(4, 8, 2)))
        small: Any = nn.Linear(2, 2, dtype=torch.bfloat16)
        small.attend = in_few_bits
        parallelize_context(small, comm, "all_gather")
        small.attend(*(part[:, :, :2] for part in drawn(4, 6, 2, torch.bfloat16)))

    minidist.run(program, 2)


@pytest.mark.parametrize("way", WAYS)
def test_what_would_be_silently_wrong_is_a_sentence(way: str) -> None:
    def program(comm: Communicator) -> None:
        model = GPT(SMALL)
        parallelize_context(model, comm, way)
        with pytest.raises(
            ValueError, match=r"layers.0.attention.attend reaches the tokens of other ranks already"
        ):
            parallelize_context(model, comm, "ulysses")
        recompute(model, "selective")  # in the other order than it should be
        with pytest.raises(ValueError, match="reaches the tokens of other ranks already"):
            parallelize_context(model, comm, way)
        with pytest.raises(
            MismatchError, match=r"rank 0 has .* in order 'contiguous', and rank 1 .* in 'striped'"
        ):
            parallelize_context(GPT(SMALL), comm, way, ("contiguous", "striped")[comm.rank])
        sent, zigzag = comm.traffic.messages, holder()
        parallelize_context(zigzag, comm, way)
        with pytest.raises(
            ValueError, match="6 tokens in a row cannot be shared out in zigzag order among 2 ranks"
        ):
            zigzag.attend(*drawn(3))
        query, key, value = drawn(4)
        with pytest.raises(
            ValueError, match=r"2 queries and 4 keys on rank .*: use no cache of keys"
        ):
            zigzag.attend(query[:, :, :2], key, value)
        assert comm.traffic.messages == sent

    minidist.run(program, 2)
