"""Fewer bits: compute in 16 or 8 bits, and keep master weights in 32.

    the book              here
    MixedPrecision        `MasterWeights` (`masters.py`), around any optimizer, also over slices
    scale                 `LossScaler` (`mixed.py`)
    finite                `check_finite`
    rounded               `stochastic_round` (`rounding.py`)

Read `minidist/precision.py` first, then `mixed.py` (what fails, and loss scaling), `masters.py`,
`rounding.py`, `fp8.py`, and `fp8_experts.py`. `blocks.py` packs numbers for the wire; `adamw.py` is
AdamW in one pass over each parameter.
"""

from minidist.full.precision.fp8 import E4M3, E5M2, dequantize, quantize, scale_for
from minidist.full.precision.masters import MasterWeights
from minidist.full.precision.mixed import LossScaler
from minidist.full.precision.rounding import stochastic_round

__all__ = [
    "E4M3",
    "E5M2",
    "LossScaler",
    "MasterWeights",
    "dequantize",
    "quantize",
    "scale_for",
    "stochastic_round",
]
