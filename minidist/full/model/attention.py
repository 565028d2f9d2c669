"""Causal attention, by the fastest kernel that torch has for a shape, chosen by a written rule.

    query [B, H, T, d]      ─┐    cuDNN's kernel       on GPUs where it is faster, in 16 bits, for long sequences
    key [B, H_kv, T, d]     ─┼▶                                                                    ─▶ [B, H, T, d]
    value [B, H_kv, T, d]   ─┘    torch's own choice   everywhere else

No kernel holds the T x T weights, or copies of shared keys (Dao et al. 2022, FlashAttention). With
a window, or documents that are packed into a row, a query does not see all keys before it: `seen.py`
leaves out those that no query of a band sees.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minidist.full.model.seen import banded_attention, first_seen

DEVICES = "cuda"  # where the rule is asked
CUDNN = 91501  # older ones were wrong where 128 does not divide T (pytorch#169849)


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None
) -> Tensor:
    """Attend to the same and earlier positions, of the same document where `documents` [B, T] says
    where each token's begins.

    Head h of `query` reads key-value head h // (H / H_kv).
    """
    if documents is not None:
        return banded_attention(query, key, value, first_seen(query.shape[2], 0, documents))
    if query.device.type == DEVICES:
        q, k, v = at_autocast(query, key, value)
        if cudnn_is_fastest(capability(), q.dtype, q.shape[3], q.shape[2]):
            # The operator itself: torch's other way to choose a kernel is a switch of the whole
            # process.
            outputs: list[Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, True
            )
            return outputs[0]
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)


@dataclass(frozen=True)
class SlidingWindow:
    """Causal attention in which a token sees itself and the `window` - 1 tokens before it."""

    window: int

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        """Attend as `causal_attention`, within the window."""
        time = query.shape[2]
        if self.window >= time:  # it sees all
            return causal_attention(query, key, value, documents)
        return banded_attention(query, key, value, first_seen(time, self.window, documents))


def at_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in the dtype of autocast, if that is on; float64 stays, as in torch's own
    attention.
    """
    kind = tensors[0].device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors
    )


def cudnn_is_fastest(
    capability: tuple[int, int], dtype: torch.dtype, head_dim: int, time: int
) -> bool:
    """Tell by the rule whether cuDNN's kernel is faster than the one that torch would take.

    It is on Hopper and on the Blackwell of data centres (compute capability 9.0, 10.0 and 10.3),
    where it takes about half the time; on Ampere, Ada and the Blackwell of workstations it is
    slower or no faster (transformers#48163). It computes in 16 bits, for heads of at most 128
    channels, a multiple of 8; queries may share keys and values. Below 1024 positions it is no
    faster (sglang#30090). The rule measures nothing, so that runs repeat.
    """
    fits = dtype in (torch.float16, torch.bfloat16) and head_dim <= 128 and head_dim % 8 == 0
    return capability in ((9, 0), (10, 0), (10, 3)) and fits and time >= 1024


def capability() -> tuple[int, int]:
    """Return the compute capability of this process's GPU.

    It is (0, 0), so that no rule applies, if cuDNN is old or switched off, or the user wants bits
    that repeat.
    """
    backends: Any = torch.backends
    wanted = backends.cuda.cudnn_sdp_enabled() and not torch.are_deterministic_algorithms_enabled()
    return (
        torch.cuda.get_device_capability()
        if wanted and (backends.cudnn.version() or 0) >= CUDNN
        else (0, 0)
    )
