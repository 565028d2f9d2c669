"""Ulysses: between the matrices each rank has some tokens of all heads, and in attention all tokens
of some heads.

                   q, k, v                                    output
    [B, H, T/P, d] ──all_to_all──▶ [B, H/P, T, d] ─▶ attend ─▶ [B, H/P, T, d] ──all_to_all──▶ [B, H, T/P, d]

Attention itself is the serial one, so any kernel will do, and any order of tokens is balanced. It
may have a window: each rank has all tokens, of which all are seen by some query. But
there are no more ranks than heads. If there are fewer key-value heads than ranks, each is sent to
all ranks that need it.

Cost: (P - 1)/P of B T/P (2 H + 2 H_kv) d elements forward, in 2 (P - 1) messages, and the same
backward; if H_kv is less than P, it counts as P. If no heads are grouped, that is 2/P of what a
rank of a ring sends forward, and less of what it sends backward. (Jacobs et al. 2023, "DeepSpeed
Ulysses".)
"""

import torch
from torch import Tensor

from minidist.full.adjoint import all_to_all
from minidist.full.context.blocks import Across
from minidist.full.context.order import positions
from minidist.full.model.attention import at_autocast


class Ulysses(Across):
    """Tokens are exchanged for heads, so that `serial` attends to all tokens."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        """Attend to the tokens of all ranks: [B, H, T/P, d], by this rank's query, key and value of
        that shape.

        Raises
        ------
        ValueError
            If heads cannot be shared out among the ranks, see `heads_fault`; or as ring and
            all_gather do.
        """
        self.check(query, key, documents)
        ranks, heads, groups = self.comm.size, query.shape[1], key.shape[1]
        if fault := heads_fault(heads, groups, ranks):
            raise ValueError(fault)
        query, key, value = at_autocast(query, key, value)
        copies = ranks // groups
        if copies > 1:
            key = key.repeat_interleave(copies, dim=1)
            value = value.repeat_interleave(copies, dim=1)
        parts = (query, key, value)
        shares = [part.shape[1] // ranks for part in parts]
        # One message to each rank: its heads of all three.
        by_rank = [torch.stack(part.chunk(ranks, dim=1)) for part in parts]
        leaving = torch.cat(by_rank, dim=2)  # [P, B, heads, T/P, d]
        arriving = all_to_all(leaving, self.comm)
        # now tokens lie by rank; therefore sort them by position for `serial`, and back
        time = ranks * query.shape[2]
        of_ranks = []
        for rank in range(ranks):
            of_ranks.append(positions(self.order, ranks, rank, time))
        lies = torch.cat(of_ranks).to(query.device)
        tokens = torch.cat(arriving.unbind(), dim=2)  # [B, heads, T, d]
        whole = tokens.index_select(2, lies.argsort())
        packed = () if documents is None else (documents,)
        output = self.serial(*torch.split(whole, shares, dim=1), *packed)
        leaving = torch.stack(output.index_select(2, lies).chunk(ranks, dim=2))
        arriving = all_to_all(leaving, self.comm)
        return torch.cat(arriving.unbind(), dim=1)  # [B, H, T/P, d]


def heads_fault(heads: int, groups: int, ranks: int) -> str:
    """Say in a sentence why `heads` queries, and `groups` keys and values, cannot be shared out;
    empty if they can.
    """
    if heads % ranks == 0 and (groups % ranks == 0 or ranks % groups == 0):
        return ""
    fault = (
        f"Ulysses shares {heads} heads, and {groups} of keys and values, out among {ranks} ranks"
    )
    return (
        f"{fault}, which does not come out even: use ranks that divide both, or ring or all_gather"
    )
