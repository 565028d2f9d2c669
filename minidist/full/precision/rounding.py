"""Stochastic rounding: a number between two neighbours goes to either at random, to the nearer one
more often.

    float32     sign  exponent  mmmmmmm mmmmmmmmmmmmmmmm
                  + random                rrrrrrrrrrrrrrrr     a carry happens with the probability mmm.../65536
    bfloat16    sign  exponent  mmmmmmm                        the rest is cut off

The neighbours of 1 in bfloat16 are 1/128 above and 1/256 below it. Rounding to the nearest loses
every update smaller than half of that, step after step. Stochastic rounding moves the weight by the
update *on average*: E[round(x)] = x. So bfloat16 weights can be trained without a float32 copy.
That saves 4 bytes a parameter and adds noise. (Gupta et al. 2015, section 3; Zamirai et al. 2021,
"Revisiting bfloat16 training".)
"""

import torch
from torch import Tensor

DROPPED_BITS = 16  # of the mantissa: float32 keeps 23, bfloat16 7


def stochastic_round(x: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 `x` to bfloat16 at random, so that its expected value is `x`.

    Infinities and NaNs stay as they are. A finite element stays finite: beyond the largest
    bfloat16, which has no upper neighbour, it becomes the largest.

    Parameters
    ----------
    x : Tensor
        float32, of any shape.
    generator : torch.Generator
        On the device of `x`. Ranks that hold the same numbers must seed it alike, or their replicas
        drift apart.

    Raises
    ------
    TypeError
        If `x` is not float32.
    """
    if x.dtype != torch.float32:
        raise TypeError(f"stochastic_round takes float32, not {x.dtype}: pass x.float()")
    largest = torch.finfo(torch.bfloat16).max
    bits = x.clamp(-largest, largest).view(torch.int32)
    noise = torch.randint(
        1 << DROPPED_BITS, x.shape, generator=generator, dtype=torch.int32, device=x.device
    )
    # carries from the mantissa into the exponent, as it should
    kept = (bits + noise) & -(1 << DROPPED_BITS)
    return torch.where(x.isfinite(), kept.view(torch.float32), x).to(torch.bfloat16)
