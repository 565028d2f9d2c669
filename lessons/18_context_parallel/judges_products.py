"""Lesson 18, task 2: how much a rank computes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minidist.course.grader.contract import Arrays, Case, Wrong

# a pair of query and key needs a score and a term of the output; in backward the score again, and a
# term of each of four gradients
FORWARD, BACKWARD = 2, 5
# of torch's own attention: where its query and key are, and how many products it takes
FUSED = {
    "_scaled_dot_product_flash_attention_for_cpu": (0, 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (1, 5),
}


class Products(TorchDispatchMode):
    """The multiplications of all matrix products, a masked one's too."""

    __module__ = (
        # torch passes this class around where the answer calls it: the watch is not to blame the
        # answer
        "products"
    )

    def __init__(self) -> None:
        super().__init__()
        self.count = self.loose = 0  # loose: with what is multiplied element by element

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        name = function.__name__.partition(".")[0]
        if name in ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot"):
            left = args[len(args) - 2]
            self.count += found.numel() * left.shape[-1]
        elif name == "mul" and all(isinstance(each, Tensor) for each in args):
            self.loose += found.numel()
        elif name in FUSED:
            at, times = FUSED[name]
            query, key = args[at : at + 2]
            self.count += times * prod(query.shape) * key.shape[2]
        return found

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, or the first operation would import torch's compiler, which takes
        seconds.
        """
        return False


def expect_shares(case: Case, results: Sequence[Arrays], products: int) -> None:
    """Raise `Wrong` if a rank multiplies more than its share of what the last rank does, which sees
    all blocks; or less than what its queries see needs, so that some of it has not been counted.

    `products` is how many a pair of query and key needs, each of as many numbers as a head has.
    """
    batch, heads, time, width = case.given[0]["query"].shape
    ranks, most, own = len(results), int(results[-1]["products"]), time // case.ranks
    for rank, result in enumerate(results):
        found, seen = int(result["products"]), rank + 1
        multiplied = found + int(result["loose"])
        pairs = own * own * rank + own * (own + 1) // 2
        if multiplied < (least := batch * heads * width * products * pairs):
            raise Wrong(
                f"rank {rank} does {multiplied:,} multiplications in torch, expected {least:,} or "
                "more: those of numpy are not counted, so multiply with torch, or call `attend` and "
                "`attend_backward`"
            )
        if found * ranks > most * seen:
            raise Wrong(
                f"rank {rank} does {found:,} multiplications in matrix products, expected at most "
                f"{most * seen // ranks:,}, {seen}/{ranks} of the last rank's: with a block of a "
                "later rank nothing is computed, not even to be thrown away"
            )
