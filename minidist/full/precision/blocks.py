"""Numbers in 8 bits with a scale for each block: what experts send in place of 16.

    block of 128 ─▶ scale = largest |x| / 448 ─▶ x / scale as an 8-bit float, and the scale in float32

The error is relative to each number. (DeepSeek-V3, section 3.3.2.)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn  # 3 bits of mantissa
FLOAT8_BLOCK = 128  # as DeepSeek-V3 sends activations


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
