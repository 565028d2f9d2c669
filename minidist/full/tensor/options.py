"""The options of tensor parallelism."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minidist.full.options import Needs, option

TENSOR_RANKS = Needs("--tp RANKS", "tp", lambda ranks: ranks > 1)


@dataclass(frozen=True)
class TensorParallelOptions:
    """How tensor parallelism splits a model.

    Attributes
    ----------
    sp : bool
        Sequence parallelism: between the matrices, split the sequence too.
    tensor_plan : mapping of str to Style, optional
        Which module is split in which style, for a model that is not our GPT; see
        `parallelize_tensor`.
    """

    sp: bool = option(
        False, "with --tp: sequence parallelism between the matrices", needs=TENSOR_RANKS
    )
    tensor_plan: Mapping[str, Any] | None = option(
        None, "styles by patterns of module names", flag=False
    )
