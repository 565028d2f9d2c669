"""Lesson 17: which tiles an answer looks at, and how large its tensors are."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from judges import TILE, cuts_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minidist.course.grader.contract import Arrays, Wrong


class Meter(TorchDispatchMode):
    """The bytes that torch's operations return, as long as somebody holds them; the products; and
    the largest tensor.

    What was `given` does not count.
    """

    __module__ = (
        # torch passes this class around where the answer calls it: the watch is not to blame the
        # answer
        "meter"
    )

    def __init__(self, *given: Tensor) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.made: weakref.WeakSet[Any] = weakref.WeakSet()
        self.peak = self.flops = 0
        self.largest: tuple[int, tuple[int, ...]] = (0, ())
        self.fused = ""  # torch's own attention, if it was called, and where
        # the shape of one that is larger than a tile in both directions
        self.matrix: tuple[int, ...] = ()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.__name__.partition(".")[0]
        if "scaled_dot_product" in name:
            self.blame(sys._getframe(1), name)
        found = function(*args, **(kwargs or {}))
        if name in ("mm", "bmm", "addmm", "baddbmm") and not adds_up(*args[-2:]):
            self.flops += 2 * found.numel() * args[-1].shape[-2]
        for each in tree_leaves(found):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in self.given:
                self.made.add(each.untyped_storage())
                # else it is a view that repeats itself
                whole = each.untyped_storage().nbytes() >= each.nbytes
                if whole and len(each.shape) > 1 and min(each.shape[-2:]) > TILE:
                    self.matrix = tuple(each.shape)
                self.largest = max(self.largest, (each.nbytes if whole else 0, tuple(each.shape)))
        self.peak = max(self.peak, self.held())
        return found

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, or the first operation would import torch's compiler, which takes
        seconds.
        """
        return False

    def held(self) -> int:
        """Return the bytes that are alive."""
        return sum(storage.nbytes() for storage in self.made)

    def blame(self, frame: Any, name: str) -> None:
        """Note who calls torch's own attention, unless it is the package: that the watch sees."""
        while (
            frame is not None
            and str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"
        ):
            frame = frame.f_back
        if (
            not self.fused
            and frame
            and not str(frame.f_globals.get("__name__", "")).startswith("minidist")
        ):
            self.fused = f"{frame.f_code.co_name}, line {frame.f_lineno}, calls torch's own, {name}"

    def __exit__(self, *error: Any) -> None:
        """Raise `Wrong` if the answer has called torch's own attention."""
        super().__exit__(*error)
        if self.fused:  # not where it was called: the answer is not to see it, and catch it
            raise Wrong(f"attention is to be built by hand, but {self.fused}")


def adds_up(left: Tensor, right: Tensor) -> bool:
    """Tell whether a matrix product is but another way to write a sum over rows: `einsum` makes it
    of rowsum(dO · O), or the right side is a column of ones.
    """
    column = right.shape[-1] == 1
    return column and (left.shape[-2] == 1 or bool((right == 1).all()))


def measured(meter: Meter) -> dict[str, Any]:
    """Return what a meter has seen."""
    return {
        "peak": meter.peak,
        "flops": meter.flops,
        "matrix": meter.matrix,
        "largest": meter.largest[1],
    }


def expect_tiles(found: Arrays, given: Arrays, products: int, wholes: int) -> int:
    """Raise `Wrong` if too much was held, or computed; return the bytes held."""
    (batch, heads, queries, size), keys = given["query"].shape, given["key"].shape[2]
    if (matrix := tuple(found["matrix"].tolist())) and min(queries, keys) > TILE:
        raise Wrong(
            f"a tensor of shape {matrix} is made: no scores, weights or mask of all queries "
            "and keys, but a tile"
        )
    most = 8 * batch * heads * (8 * TILE**2 + wholes * max(queries, keys) * size)
    if (peak := int(found["peak"])) > most:
        shape = tuple(found["largest"].tolist())
        row = ": all keys of a tile of queries are together" if shape[-2:] == (TILE, keys) else ""
        row = (
            ": all queries of a tile of keys are together" if shape[-2:] == (queries, TILE) else row
        )
        raise Wrong(
            f"{peak:,} bytes are held at a time besides the arguments, expected at most {most:,}; "
            f"the largest tensor has the shape {shape}, a tile of all heads has "
            f"{(batch, heads, TILE, TILE)}{row}"
        )
    down, across = len(cuts_of(queries)), len(cuts_of(keys))
    tiles = sum(min(row + 1, across) for row in range(down)) if given["causal"] else down * across
    tile = products * 2 * batch * heads * TILE**2 * size
    if (flops := int(found["flops"])) > tiles * tile:
        above = (
            given["causal"]
            and abs(flops / (products * 2 * batch * heads * size) - queries * keys) < 1
        )
        why = (
            "no tile wholly above the diagonal is to be computed"
            if above
            else f"each tile takes {products} products"
        )
        raise Wrong(
            f"matrix products take {flops:,} operations, expected at most {tiles * tile:,}: {why}"
        )
    return peak
