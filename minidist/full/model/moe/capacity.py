"""Capacity: in each sequence, an expert serves the first C tokens that chose it.

    C = ⌈factor · k T/E⌉ of a sequence of T tokens; what comes later adds nothing

Room that a microbatch or a rank shared out among the tokens it happens to have would depend on the
layout. So room belongs to a sequence, and a token's position decides who comes first. (Fedus et
al. 2021, Switch, section 2.1.)
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from minidist.full.model.config import GPTConfig
from minidist.full.model.dropout import Where

Sum: TypeAlias = Callable[[Tensor], Tensor]
"""Returns the sum of a tensor over the ranks that matter; on one rank the tensor itself."""


def choices_with_room(
    choice_BTK: Tensor, where: Where, config: GPTConfig, sum_over_sequence: Sum
) -> Tensor:
    """Return which choices [B, T, K] have room: in each sequence the first ones of each expert.

    `where` gives the tokens' positions, and `sum_over_sequence` adds up over the ranks that have
    others of the same sequences.
    """
    if not config.capacity:
        return torch.ones_like(choice_BTK, dtype=torch.bool)
    rows, time, k = choice_BTK.shape
    positions_T = where.position_numbers(time, choice_BTK.device)
    sequence_BSK = choice_BTK.new_zeros(rows, config.sequence, k)
    sequence_BSK[:, positions_T] = choice_BTK + 1  # 0: no token
    sequence_BSK = sum_over_sequence(sequence_BSK)
    numbers_E = torch.arange(1, config.experts + 1, device=choice_BTK.device)
    chosen_BSE = (sequence_BSK[..., None] == numbers_E).any(2)
    # how many tokens before this one chose the expert
    earlier_BSE = chosen_BSE.cumsum(1) - chosen_BSE.long()
    earlier_BTK = earlier_BSE[:, positions_T].gather(-1, choice_BTK)
    tokens = (sequence_BSK[:1, :, 0] > 0).sum().double()
    room = (config.capacity * k * tokens / config.experts).ceil()
    return earlier_BTK < room
