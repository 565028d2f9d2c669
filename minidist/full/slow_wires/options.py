"""The options of sites that train apart, and now and then meet."""

from dataclasses import dataclass

from minidist.full.options import (
    AT_LEAST_ONE,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Needs,
    option,
)

LOCAL = Needs("--local-steps STEPS", "local_steps", lambda steps: steps > 0)


@dataclass(frozen=True)
class SiteOptions:
    """How often the sites of the axis `dcn` meet, and what happens then.

    Attributes
    ----------
    local_steps : int
        Steps of the optimizer from one meeting to the next. 0: there are no sites.
    outer_lr, outer_momentum : float
        Of the outer optimizer, SGD with Nesterov momentum. By default DiLoCo's; 1 and 0 average the
        sites (local SGD).
    fragments : int
        Parts of the model that meet in turn, each every `local_steps` steps.
    outer_delay : int
        Steps for which training goes on while a fragment travels.
    mixing : float
        When a fragment has arrived: the share of this site's own parameters in what it goes on
        with; the rest is what all sites share.
    """

    local_steps: int = option(
        0, "steps that each site of --dcn trains alone before they meet", NOT_NEGATIVE, exact=False
    )
    outer_lr: float = option(
        0.7, "learning rate of the outer step, when sites meet", POSITIVE, needs=LOCAL
    )
    outer_momentum: float = option(
        0.9, "Nesterov momentum of the outer step; 0: none", FRACTION, needs=LOCAL
    )
    fragments: int = option(
        1, "parts of the model that meet in turn, not all at once", AT_LEAST_ONE, needs=LOCAL
    )
    outer_delay: int = option(
        0, "steps that training goes on while a fragment travels", NOT_NEGATIVE, needs=LOCAL
    )
    mixing: float = option(
        0.0,
        "share of a site's own parameters in what it goes on with after meeting",
        FRACTION,
        needs=LOCAL,
    )

    @property
    def outer_copies(self) -> int:
        """How many numbers are kept for each parameter: what sites share, what travels, and the
        momentum.
        """
        return 2 + (self.outer_momentum > 0) if self.local_steps else 0

    @property
    def chooses(self) -> bool:
        """Whether what is sent of an element depends on which others a rank has."""
        return False
