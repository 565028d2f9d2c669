"""NF4: weights in four bits each, for weights that are distributed about normally.

    64 weights ─▶ scale = largest |w| ─▶ w / scale in [-1, 1] ─▶ nearest of 16 levels ─▶ 4 bits, two to a byte
    256 scales ─▶ scale - mean, in steps of (largest deviation) / 127 ─▶ one int8 each ("double quantisation")

The levels are quantiles: normal weights use each level about equally often, so the four bits carry
the most information. Zero is a level, so a weight of zero stays zero.

Bits per weight: 4 + 8/64 (scales) + 32/(64 * 256) (steps) = 4.127; float32 scales would make it
4.5. Each tensor stores one mean besides. (Dettmers et al. 2023, QLoRA, section 3 and appendix E.
The paper stores the scales in FP8. Once the mean is subtracted, int8 suits them as well, and its
steps are finer near the ends.)
"""

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # weights that share a scale
GROUP = 256  # scales that share a step
OFFSET = 0.9677083  # the quantile that becomes ±1: 1 - (1/32 + 1/30)/2, half a level from the end


@dataclass(frozen=True)
class NF4Tensor:
    """A quantised tensor.

    Attributes
    ----------
    codes : Tensor
        uint8 [⌈n/2⌉]: two level numbers a byte, that of the earlier weight in the high bits.
    scales : Tensor
        int8 [⌈n/64⌉]: the deviation of each block's scale from the mean, in steps of its group.
    steps : Tensor
        float32 [⌈n/(64 * 256)⌉]: the step of each group.
    mean : Tensor
        float32 [1]: the mean of all scales.
    shape : torch.Size
        Shape of the n weights.
    """

    codes: Tensor
    scales: Tensor
    steps: Tensor
    mean: Tensor
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Bytes of all four tensors."""
        return sum(tensor.nbytes for tensor in (self.codes, self.scales, self.steps, self.mean))


@cache
def levels() -> tuple[float, ...]:
    """Return the 16 levels, ascending: quantiles of the normal distribution, scaled to end at -1
    and 1.

    Each side has levels of equal probability from `OFFSET` to the middle: 8 above zero and 7 below.
    (QLoRA, section 3.)
    """
    quantile = NormalDist().inv_cdf
    above = [quantile(OFFSET + (0.5 - OFFSET) * i / 8) for i in range(8)]
    below = [-quantile(OFFSET + (0.5 - OFFSET) * i / 7) for i in range(7)]
    return tuple(level / above[0] for level in sorted([*below, 0.0, *above]))


def quantize(weights: Tensor) -> NF4Tensor:
    """Round every weight to the nearest level of its block.

    Scales are rounded up, so no weight lies outside the levels. The error of a weight is therefore
    at most half the widest gap, 0.152, times (the block's largest |w| + one step). A step is 1/127
    of the largest deviation from the mean in its group.

    Raises
    ------
    ValueError
        If a weight is infinite or not a number: its whole block would be lost.
    """
    flat = weights.detach().flatten().to(torch.float32)
    if not flat.is_meta and not flat.isfinite().all():
        raise ValueError(
            f"a weight of {tuple(weights.shape)} is infinite or not a number, and has no place in "
            "NF4"
        )
    blocks = _rows(flat, BLOCK)  # [n/64, 64]
    largest = blocks.abs().amax(dim=1)  # [n/64]
    mean = largest.mean().reshape(1) if len(largest) else flat.new_zeros(1)
    deviations = _rows(largest - mean, GROUP)  # [groups, 256]; the padding deviates by nothing
    steps = deviations.abs().amax(dim=1) / 127
    in_steps = deviations / _not_zero(steps)[:, None]
    rounded = in_steps.ceil().clamp(-127, 127).flatten()
    scales = rounded[: len(largest)].to(torch.int8)
    scaled = blocks / _not_zero(_widen(scales, steps, mean))[:, None]
    table = torch.tensor(levels(), device=flat.device)
    middles = (table[1:] + table[:-1]) / 2
    nearest = torch.bucketize(scaled, middles).flatten()[: len(flat)]
    pairs = _rows(nearest.to(torch.uint8), 2)  # [n/2, 2]
    codes = pairs[:, 0] << 4 | pairs[:, 1]
    return NF4Tensor(
        codes,
        scales,
        steps,
        mean,
        weights.shape,
    )


def dequantize(packed: NF4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weights that the codes stand for. One look-up of a byte gives two weights."""
    table = torch.tensor(
        levels(),
        dtype=dtype,
        device=packed.codes.device,
    )
    of_high_bits = table.repeat_interleave(16)
    of_low_bits = table.repeat(16)
    both = torch.stack((of_high_bits, of_low_bits), dim=1)  # [256, 2]
    pairs = F.embedding(packed.codes.int(), both)
    flat = pairs.flatten()[: packed.shape.numel()]
    scales = _widen(packed.scales, packed.steps, packed.mean).to(dtype)
    whole = len(flat) // BLOCK * BLOCK
    flat[:whole].view(-1, BLOCK).mul_(scales[: whole // BLOCK, None])
    flat[whole:].mul_(scales[whole // BLOCK :])  # the last block, if it is not full
    return flat.view(packed.shape)


def _widen(scales: Tensor, steps: Tensor, mean: Tensor) -> Tensor:
    """Return the scales in float32. They are never negative; rounding errors are clamped."""
    of_each = steps.repeat_interleave(GROUP)[: len(scales)]
    return (scales * of_each + mean).clamp_(min=0)


def _rows(flat: Tensor, length: int) -> Tensor:
    """Return rows of this length, the last padded with zeros."""
    return F.pad(flat, (0, -len(flat) % length)).view(-1, length)


def _not_zero(divisor: Tensor) -> Tensor:
    """Replace zeros, which divide only zeros here, by ones."""
    return torch.where(divisor == 0, 1, divisor)
