"""The options of ZeRO++."""

from dataclasses import dataclass

from minidist.full.ddp.options import ZERO_3
from minidist.full.options import option


@dataclass(frozen=True)
class ZeROPlusPlusOptions:
    """Whether ZeRO 3 sends fewer bytes between nodes.

    Attributes
    ----------
    zeropp : bool
        It does; see `ZeROPlusPlus`.
    node_ranks : int, optional
        With `zeropp`: neighbouring ranks of the data axis that form a node; by default those that
        share memory.
    """

    zeropp: bool = option(
        False,
        "with --zero 3: ZeRO++, a quarter of the bytes between nodes",
        needs=ZERO_3,
        exact=False,
    )
    node_ranks: int | None = option(None, "with zeropp: ranks in a node", flag=False)
