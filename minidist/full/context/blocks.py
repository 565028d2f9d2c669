"""What a rank does with one block of keys and values, wherever it came from, and how partial
results become one.

    so far   output, lse   ─┐
                            ├─▶ output + σ(lse' - lse) (output' - output),   log(exp(lse) + exp(lse'))
    block    output', lse' ─┘

Softmax over all keys is a mean of the softmaxes over blocks of keys, each weighted by the sum of
its exponentials. Only the logarithm of that sum is kept, `lse`. Written like this nothing
overflows, however large the scores are. Both are float32 at least: rounded to 16 bits at each
merge, they would carry an error that grows with the number of blocks.

In backward, what a block needs of all others is in the *merged* output and lse: exp(score - lse) is
its share of the whole softmax. (Milakov & Gimelshein 2018; Liu, Zaharia & Abbeel 2023, "Ring
attention", section 3.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minidist.full.comm import Communicator
from minidist.full.context.flash import attend, attend_backward
from minidist.full.context.in_sight import InSight
from minidist.full.context.order import Meeting, Sight, check_time, meeting, sight_of
from minidist.full.context.probe import Probe
from minidist.full.model.attention import at_autocast
from minidist.full.model.gpt import Attend


class Attended(NamedTuple):
    """Queries [B, H, T, d], their output so far [B, H, T, d], and the logarithms of its
    denominators, lse [B, H, T].
    """

    query: Tensor
    output: Tensor
    lse: Tensor

    def of(self, met: Meeting) -> Attended:
        """Return the part that takes part in a meeting: views."""
        return Attended(*(tensor[:, :, met.queries] for tensor in self))


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype in which results are merged and gradients summed."""
    return torch.promote_types(x.dtype, torch.float32)


def before_any(query: Tensor) -> Attended:
    """Return the result of queries that have met no keys."""
    output = torch.zeros_like(query, dtype=wide(query), memory_format=torch.contiguous_format)
    return Attended(query, output, torch.full_like(output[..., 0], -torch.inf))


def meet(mine: Attended, block: Tensor, met: Meeting) -> None:
    """Let queries attend to a block of keys and values [2, B, H_kv, T, d], and merge the result
    into theirs.
    """
    query, output, lse = mine.of(met)
    key, value = block[..., met.keys, :]
    more, its = attend(query, key, value, met.causal, seen=met.seen)
    output.lerp_(more, torch.sigmoid(its - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, its))


def meet_backward(
    gradient: Tensor,
    mine: Attended,
    block: Tensor,
    met: Meeting,
    to_query: Tensor,
    to_block: Tensor,
) -> None:
    """Add the gradients of a meeting: `to_query` [B, H, T, d], and `to_block` [2, B, H_kv, T, d].

    `mine` has the output and lse of *all* meetings, and `gradient` is that of its output.
    """
    query, output, lse = mine.of(met)
    key, value = block[..., met.keys, :]
    mine_of = gradient[:, :, met.queries]
    terms = attend_backward(mine_of, query, key, value, output, lse, met.causal, seen=met.seen)
    totals = (to_query[:, :, met.queries], *to_block[..., met.keys, :])
    for total, term in zip(totals, terms, strict=True):
        total += term


@dataclass(frozen=True)
class Across:
    """Attention of this rank's queries to the keys of all ranks; called as an `Attend`, on this
    rank's tokens.

    Attributes
    ----------
    comm : Communicator
        Along the context axis.
    order : str
        The order in which the tokens lie.
    serial : Attend
        What attends to the tokens of one rank.
    probe : Probe, optional
        Asks whether `serial` is what is computed here in its place.
    window : int
        A query sees itself and the window - 1 tokens before it; 0: all before it.
    """

    comm: Communicator
    order: str
    serial: Attend
    probe: Probe | None = field(default=None, kw_only=True, compare=False)
    window: int = field(default=0, kw_only=True)

    def check(self, query: Tensor, key: Tensor, documents: Tensor | None = None) -> None:
        """Raise ValueError if these tokens are not those that a rank has in this order.

        Nothing is sent.
        """
        time, ranks = query.shape[2], self.comm.size
        if key.shape[2] != time:
            fault = f"{time} queries and {key.shape[2]} keys on rank {self.comm.rank}"
            reason = "context parallelism gives a rank both of the same tokens"
            raise ValueError(
                f"{fault}, but {reason}: use no cache of keys, and no attention to another sequence"
            )
        check_time(self.order, ranks, ranks * time)
        wanted = (query.shape[0], ranks * time)
        if documents is not None and documents.shape != wanted:
            raise ValueError(
                f"documents={list(documents.shape)} do not say where that of each token begins: give "
                f"those of all ranks' tokens, {list(wanted)}"
            )


class ByBlocks(Across):
    """The keys and values of one rank after the other are met, and results merged."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        """Map queries, keys and values of this rank's tokens to their output [B, H, T/P, d].

        Raises
        ------
        ValueError
            If there are not as many keys as queries, the order cannot share so many tokens out, or
            `serial` is found to be another attention. All ranks find the same.
        """
        self.check(query, key, documents)
        ranks = self.comm.size
        time = ranks * query.shape[2]
        if self.probe is not None:
            self.probe.ask(query, key, time)
        sight = sight_of(self.order, ranks, time, self.window, documents)
        across = self if sight is None else self.within(sight)
        return BlockAttention.apply(*at_autocast(query, key, value), across)  # type: ignore[no-any-return, no-untyped-call]

    def within(self, sight: Sight) -> InSight:
        """Return what fetches only the keys that are seen, if that is not all of them."""
        return InSight(self.comm, sight)

    def meeting(self, source: int, time: int) -> Meeting | None:
        """Return what this rank's queries have to do with the keys of `source`, `time` of each."""
        return meeting(self.order, self.comm.rank, source, time)

    @abstractmethod
    def blocks(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each rank, and its keys and values [2, B, H_kv, T/P, d]; `mine` are this rank's."""

    @abstractmethod
    def home(self, terms: Iterable[tuple[int, Tensor]]) -> Tensor:
        """Sum over ranks what each has to add to the gradients of each block.

        Return those of this rank's block.

        The `terms` come as `blocks` does, each computed when it is asked for.
        """


class BlockAttention(torch.autograd.Function):
    """Meets one block after the other, in backward again.

    It saves query, key, value, output and lse of this rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        across: ByBlocks | InSight,
    ) -> Tensor:
        mine, time = before_any(query), query.shape[2]
        for source, block in across.blocks(torch.stack((key, value))):
            if met := across.meeting(source, time):
                meet(mine, block, met)
        ctx.across, output = across, mine.output.to(query.dtype)
        ctx.save_for_backward(query, output, mine.lse, key, value)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        *saved, key, value = ctx.saved_tensors
        mine, across, time = Attended(*saved), ctx.across, key.shape[2]
        to_query = torch.zeros_like(mine.query, dtype=wide(key))

        def terms() -> Iterator[tuple[int, Tensor]]:
            for source, block in across.blocks(torch.stack((key, value))):
                to_block = torch.zeros_like(block, dtype=wide(key))
                if met := across.meeting(source, time):
                    meet_backward(gradient, mine, block, met, to_query, to_block)
                yield source, to_block

        to_key, to_value = across.home(terms()).to(key.dtype)
        return to_query.to(key.dtype), to_key, to_value, None
