"""Which keys a query sees where it does not see all before it: always an unbroken run of them.

    causal          a window of 2        documents of 2 and 3 tokens, packed into a row
    ■               ■                    ■
    ■ ■             ■ ■                  ■ ■
    ■ ■ ■           . ■ ■                . . ■
    ■ ■ ■ ■         . . ■ ■              . . ■ ■
    ■ ■ ■ ■ ■       . . . ■ ■            . . ■ ■ ■

The query at position t sees the keys from `first` to t, where `first` is the latest of 0,
t - W + 1 and the beginning of its document. So a mask is one number for each query, and two if some
of the keys are elsewhere: the first that is seen, and the one behind the last. Both ascend.
Therefore the tiles that a tile of queries sees lie between those of its first query and those of
its last one, and all others can be left out.

Cost: with a window of W, T W - W (W - 1)/2 pairs of query and key in place of T (T + 1)/2.
(Beltagy et al. 2020, "Longformer", section 3.1; Jiang et al. 2023, "Mistral 7B"; documents as by
Krell et al. 2021, "Efficient sequence packing without cross-contamination".)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BAND = 128  # queries that `banded_attention` computes at once


class Seen(NamedTuple):
    """Query i sees keys first[i] to end[i] - 1, by their places in the keys at hand.

    Attributes
    ----------
    first, end : Tensor
        int64 [b, Tq], where b is 1 or the number of sequences. Both ascend along the queries.
    """

    first: Tensor
    end: Tensor

    def mask(self, rows: slice, columns: slice) -> Tensor:
        """Return which queries of a tile see which of its keys: boolean [b, rows, columns]."""
        keys = torch.arange(columns.start, columns.stop, device=self.first.device)
        begun = keys >= self.first[:, rows, None]
        ended = keys >= self.end[:, rows, None]
        return begun & ~ended

    def tiles(self, keys: int, tile: int) -> Tensor:
        """Return which tiles of queries see anything of which tiles of keys.

        A tile counts if it is seen in any of the sequences: boolean [tiles of queries, tiles of
        keys].
        """
        begins = torch.arange(0, keys, tile)
        queries = self.first.shape[1]
        seen = torch.zeros(-(-queries // tile), len(begins), dtype=torch.bool)
        for number in range(len(seen)):
            start = number * tile
            mine = slice(start, start + tile)
            low = self.first[:, mine, None].cpu()
            high = self.end[:, mine, None].cpu()
            not_before = high > begins
            not_behind = low < begins + tile
            overlaps = not_before & not_behind & (low < high)
            seen[number] = overlaps.flatten(0, 1).any(0)
        return seen

    def check(self, query: Tensor) -> None:
        """Raise ValueError unless there is a number for each query [B, H, Tq, d]."""
        rows, _, queries, _ = query.shape
        first = list(self.first.shape)
        end = list(self.end.shape)
        if first != end or first not in ([1, queries], [rows, queries]):
            raise ValueError(
                f"seen= has bounds {first} and {end} for queries {list(query.shape)}: give both as "
                f"[1, {queries}] or [{rows}, {queries}]"
            )


def bounds(seen: Seen | None, device: torch.device) -> tuple[Tensor, ...]:
    """Return both bounds as kernels take them, int32 on this device; nothing without a mask."""
    if seen is None:
        return ()
    first = seen.first.to(device, torch.int32)
    end = seen.end.to(device, torch.int32)
    return first.contiguous(), end.contiguous()


def causal(time: int) -> Seen:
    """Return the mask in which each query sees itself and all before it."""
    end = torch.arange(1, time + 1)[None]
    return Seen(torch.zeros_like(end), end)


def first_seen(time: int, window: int = 0, documents: Tensor | None = None) -> Tensor:
    """Return the first position that each of `time` tokens sees: int64 [b, T].

    Parameters
    ----------
    window : int
        A token sees itself and window - 1 tokens before it; 0: all.
    documents : Tensor, optional
        Where the document of each token begins, int64 [B, T]; see `beginnings`. b is then B, and
        else 1.
    """
    positions = torch.arange(time)
    first = positions - (window or time) + 1
    first = first.clamp(min=0)[None]
    if documents is None:
        return first
    return torch.maximum(first, documents.cpu())


def beginnings(cu_seqlens: Tensor) -> Tensor:
    """Return where the document of each token begins, int64 [T].

    `cu_seqlens` [documents + 1] is what kernels for sequences of any length take: 0, and where each
    document ends.

    Raises
    ------
    ValueError
        If these are no ends of documents.
    """
    ends = cu_seqlens.tolist()
    fits = len(ends) > 1 and ends[0] == 0 and ends == sorted(ends)
    if not fits:
        raise ValueError(
            f"cu_seqlens={ends} are no ends of documents: give 0, and then the sum of the lengths so "
            "far, which ascends"
        )
    sizes = cu_seqlens.diff()
    begins = cu_seqlens[:-1].to(torch.int64)
    return begins.repeat_interleave(sizes)


def among(first: Tensor, queries: Tensor, keys: Tensor) -> Seen:
    """Return the mask of queries at some positions, which see those from `first` [b, Tq] on, and of
    the keys at others.

    Both are int64, [Tq] and [Tk], and ascend.
    """
    keys = keys.contiguous()
    begins = torch.searchsorted(keys, first.contiguous())
    ends = torch.searchsorted(keys, queries.contiguous(), right=True)
    return Seen(begins, ends.expand_as(begins).contiguous())


def in_documents(cu_seqlens: Tensor, window: int = 0) -> Seen:
    """Return the mask of a row of documents, each of which attends to itself alone.

    It is the same for all rows; see `beginnings`.
    """
    documents = beginnings(cu_seqlens)[None]
    time = documents.shape[1]
    places = torch.arange(time)
    return among(first_seen(time, window, documents), places, places)


def banded_attention(query: Tensor, key: Tensor, value: Tensor, first: Tensor) -> Tensor:
    """Return causal attention in which each query sees the positions from `first` [b, T] on.

    Torch's own attention is called for a band of queries at a time, and the bands of keys that some
    of them see: less than T (W + 256) pairs with a window of W, and no T x T mask.
    """
    grouped = query.shape[1] != key.shape[1]
    # `split` and `cat`, not slices: the gradient of each slice would have the size of all keys
    queries = torch.split(query, BAND, dim=2)
    keys = torch.split(key, BAND, dim=2)
    values = torch.split(value, BAND, dim=2)
    found = []
    bias, like = None, None
    for number, band in enumerate(queries):
        start = number * BAND
        rows = slice(start, start + band.shape[2])
        begins = first[:, rows]
        earliest = int(begins.min()) // BAND if len(begins) else number
        columns = slice(earliest * BAND, rows.stop)
        # inside a window one band is masked as the next: they share the mask that backward needs
        width = rows.stop - columns.start
        begins = begins - columns.start
        if like is None or not same(like, begins, width):
            like = begins, width
            bias = bias_of(first, rows, columns, query)
        seen = slice(earliest, number + 1)
        attended = F.scaled_dot_product_attention(
            band,
            torch.cat(keys[seen], dim=2),
            torch.cat(values[seen], dim=2),
            attn_mask=bias,
            enable_gqa=grouped,
        )
        found.append(attended)
    return torch.cat(found, dim=2)


def same(band: tuple[Tensor, int], begins: Tensor, keys: int) -> bool:
    """Tell whether a band is masked as the one before: what it sees begins at the same places among
    as many keys.
    """
    before, as_many = band
    return keys == as_many and torch.equal(before, begins)


def bias_of(first: Tensor, rows: slice, keys: slice, like: Tensor) -> Tensor:
    """Return what is added to the scores of some queries and keys: 0 where one is seen, else -inf;
    [b, 1, rows, keys].
    """
    first = first[:, : rows.stop]
    end = torch.arange(1, rows.stop + 1)
    seen = Seen(first, end.expand_as(first)).mask(rows, keys)
    bias = torch.zeros(seen.shape, dtype=like.dtype)
    bias.masked_fill_(~seen, -torch.inf)
    return bias.unsqueeze(1).to(like.device)
