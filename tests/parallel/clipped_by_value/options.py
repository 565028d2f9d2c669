"""The options of clipping by value."""

from dataclasses import dataclass

from minidist.full.options import NOT_NEGATIVE, option


@dataclass(frozen=True)
class ClippingOptions:
    """How large an element of a gradient may be.

    Attributes
    ----------
    largest : float
        Larger elements become this, with their sign. 0: none does.
    """

    largest: float = option(0.0, "largest element of a gradient; 0: any", NOT_NEGATIVE)
