"""Numbers in 8, 4 or 1 bits with a scale for each block: what is sent in place of 16 or 32.

    block of 256 ─▶ scale = largest |x| / 127 (8 bits) or / 7 (4 bits) ─▶ round(x / scale), and the scale in float32

The error of a number is at most half its block's scale, so one large number spoils a block, not the
whole tensor. (Wang et al. 2023, ZeRO++, section 4.1.)
"""

import torch
from torch import Tensor

BLOCK = 256  # numbers that share a scale


def pack(rows: Tensor, bits: int) -> Tensor:
    """Return each row quantised: codes, then scales, as bytes.

    Parameters
    ----------
    rows : Tensor
        Floats [R, n]; n is a multiple of `BLOCK`.
    bits : {8, 4}

    Returns
    -------
    Tensor
        uint8 [R, n * bits / 8 + n / BLOCK * 4].
    """
    count = len(rows)
    largest_code = 2 ** (bits - 1) - 1
    blocks = rows.reshape(count, -1, BLOCK).float()
    largest = blocks.abs().amax(-1, keepdim=True)
    scales = largest / largest_code
    in_steps = torch.where(scales > 0, blocks / scales, 0.0)
    codes = in_steps.round_().to(torch.int8).reshape(count, -1)
    if bits == 4:
        high = codes[:, ::2] << 4  # the earlier number of each pair
        low = codes[:, 1::2] & 15  # the low four bits, of a negative number too
        codes = high | low
    scales = scales.reshape(count, -1)
    parts = codes.view(torch.uint8), scales.view(torch.uint8)
    return torch.cat(parts, dim=1)


def unpack(packed: Tensor, count: int, bits: int) -> Tensor:
    """Undo `pack`, up to rounding: return float32 [R, count]."""
    rows = len(packed)
    codes, scales = torch.split(
        packed,
        [count * bits // 8, count // BLOCK * 4],
        dim=1,
    )
    signed = codes.contiguous().view(torch.int8)
    if bits == 4:  # shifting a signed number right keeps its sign
        high = signed >> 4
        low = (signed << 4) >> 4
        signed = torch.stack((high, low), dim=-1)
    blocks = signed.reshape(rows, -1, BLOCK)
    steps = scales.contiguous().view(torch.float32)
    numbers: Tensor = blocks * steps.unsqueeze(-1)
    return numbers.reshape(rows, count)


def pack_signs(rows: Tensor) -> Tensor:
    """Return each row [R, n] as bytes: a bit for each sign, then the mean magnitude of each block.

    n is a multiple of `BLOCK`. Returns uint8 [R, n / 8 + n / BLOCK * 4].
    """
    count = len(rows)
    blocks = rows.reshape(count, -1, BLOCK)
    magnitudes = blocks.abs()
    means = magnitudes.mean(-1).float()
    positive = rows >= 0
    eights = positive.reshape(count, -1, 8)
    weights = 1 << torch.arange(8, device=rows.device)
    codes = (eights * weights).sum(-1)
    parts = codes.to(torch.uint8), means.view(torch.uint8)
    return torch.cat(parts, dim=1)


def unpack_signs(packed: Tensor, count: int) -> Tensor:
    """Undo `pack_signs`, as far as it can be: return float32 [R, count]."""
    rows = len(packed)
    codes, means = torch.split(
        packed,
        [count // 8, count // BLOCK * 4],
        dim=1,
    )
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = codes.unsqueeze(-1) >> places & 1
    signs = 2.0 * bits - 1.0
    blocks = signs.reshape(rows, -1, BLOCK)
    scales = means.contiguous().view(torch.float32)
    numbers: Tensor = blocks * scales.unsqueeze(-1)
    return numbers.reshape(rows, count)
