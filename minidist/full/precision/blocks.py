"""Numbers in 8 or 4 bits with a scale for each block: what experts send in place of 16.

    block of 256 ─▶ scale = largest |x| / 127 (8 bits) or / 7 (4 bits) ─▶ round(x / scale), and the scale in float32

The error of a number is at most half its block's scale, so one large number spoils a block, not the
whole tensor. (Wang et al. 2023, ZeRO++, section 4.1.) `pack_float8` keeps 8-bit floats, whose error
is relative to each number.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256  # numbers that share a scale
FLOAT8 = torch.float8_e4m3fn  # 3 bits of mantissa
FLOAT8_BLOCK = 128  # as DeepSeek-V3 sends activations


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


def pack_float8(rows: Tensor) -> Tensor:
    """Return each row [R, n] as bytes: 8-bit floats, then a float32 scale for each `FLOAT8_BLOCK`
    of them.

    The last block may be shorter. Returns uint8 [R, n + 4 ceil(n / FLOAT8_BLOCK)].
    """
    padded = F.pad(rows.float(), (0, -rows.shape[1] % FLOAT8_BLOCK))
    blocks = padded.view(
        len(rows),
        padded.shape[1] // FLOAT8_BLOCK,
        FLOAT8_BLOCK,
    )
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    scales = largest / torch.finfo(FLOAT8).max
    padded_codes = (blocks / scales).to(FLOAT8).flatten(1)
    codes = padded_codes[:, : rows.shape[1]].contiguous()
    scales = scales.flatten(1)
    parts = codes.view(torch.uint8), scales.view(torch.uint8)
    return torch.cat(parts, dim=1)


def unpack_float8(packed: Tensor, count: int) -> Tensor:
    """Undo `pack_float8`, up to rounding: return float32 [R, count]."""
    codes, scales = (
        part.clone(memory_format=torch.contiguous_format)
        for part in packed.tensor_split([count], 1)
    )
    of_each = scales.view(torch.float32).repeat_interleave(FLOAT8_BLOCK, 1)[:, :count]
    return codes.view(FLOAT8).float() * of_each
