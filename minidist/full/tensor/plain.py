"""Tensor parallelism on one page: every rank holds and computes a part of an MLP and of an
attention.

                 x [B, T, D], the same on every rank
                 │ f   forward: nothing          backward: all_reduce
      ┌──────────┴───────────┐
      │ column-parallel      │  Y_r = X A_r     [B, T, C/P]   A's outputs are cut: gate, up, query, key, value
      │ what treats channels │  silu, attention by heads: no message
      │ row-parallel         │  Z_r = Y_r B_r   [B, T, D]     B's inputs are cut: down, output
      └──────────┬───────────┘
                 │ g   forward: all_reduce       backward: nothing
                 z = Σ Z_r [B, T, D], the same on every rank

Between the two cuts nothing has to be sent: that is why they come in this order. `x` enters once,
for all matrices that read it: if each matrix let it enter by itself, backward would all-reduce two
or three times.

Cost of each function: one all-reduce of B T D numbers in forward and one in backward. Each sends 2
(P - 1)/P of these numbers from each rank. (Shoeybi et al. 2019, "Megatron-LM", section 3.)
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from minidist.full.adjoint import copy_to, reduce_from
from minidist.full.comm import Communicator
from minidist.full.model.attention import causal_attention
from minidist.model import Rotary, rotate


def mlp(x: Tensor, mine: Mapping[str, Tensor], comm: Communicator) -> Tensor:
    """Return down(silu(gate(x)) * up(x)) [B, T, D] on every rank.

    Collective, and so is its backward.

    `mine` are this rank's channels: some rows of `gate` and `up` [C/P, D], the same columns of
    `down` [D, C/P].
    """
    inside = copy_to(x, comm)  # f
    gate, up = F.linear(inside, mine["gate"]), F.linear(inside, mine["up"])
    hidden = F.silu(gate) * up  # [B, T, C/P]
    return reduce_from(F.linear(hidden, mine["down"]), comm)  # g


def attention(
    x: Tensor,
    mine: Mapping[str, Tensor],
    head_dim: int,
    comm: Communicator,
    rotary: Rotary | None = None,
) -> Tensor:
    """Return causal attention over all heads [B, T, D] on every rank.

    Collective, and so is its backward.

    `mine` are this rank's heads, each of them whole: some rows of `query`, `key` and `value`
    [H/P * d, D], the same columns of `output` [D, H/P * d]. With a `rotary` table, queries and keys
    are rotated by their positions.
    """
    inside = copy_to(x, comm)  # f
    heads = []
    for name in ("query", "key", "value"):
        channels = F.linear(inside, mine[name])  # [B, T, H/P * d]
        by_head = channels.view(*x.shape[:2], -1, head_dim)
        heads.append(by_head.transpose(1, 2))  # [B, H/P, T, d]
    query, key, value = heads
    if rotary is not None:
        query, key = rotate(query, rotary), rotate(key, rotary)
    found = causal_attention(query, key, value)  # [B, H/P, T, d]
    channels = found.transpose(1, 2).flatten(2)  # [B, T, H/P * d]
    return reduce_from(F.linear(channels, mine["output"]), comm)  # g
