"""The option of outer steps of which little is sent."""

from dataclasses import dataclass

from minidist.full.options import Limit, option
from minidist.full.slow_wires.options import LOCAL, SiteOptions

SHARE = Limit("0, or a share of at most 1", lambda share: 0 <= share <= 1)


@dataclass(frozen=True)
class SparseSiteOptions(SiteOptions):
    """How often sites meet, and how much of an outer step they send.

    Attributes
    ----------
    outer_topk : float
        Send this share of each 4,096 elements, in 2 bits each, and keep the others for the next
        meeting; see `SparseStep`. 0: send all.
    """

    outer_topk: float = option(
        0.0,
        "send only this share of the outer step, in 2 bits, the rest later; 0: all",
        SHARE,
        needs=LOCAL,
    )

    @property
    def outer_copies(self) -> int:
        """How many numbers are kept for each parameter: also what was not sent."""
        return super().outer_copies + bool(self.local_steps and self.outer_topk)

    @property
    def chooses(self) -> bool:
        """Whether what is sent of an element depends on which others a rank has."""
        return self.outer_topk > 0
