"""Is a model's own `attend` plain causal attention? Ring and all_gather compute that in its place.

`SlidingWindow` says by its type what it is. Anything else counts as plain, and its first call in
training and in evaluation tries it out: on a few random tokens, where another scale, a bias, a
missing mask or dropout make a difference, and on many equal ones, where a window does.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from minidist.full.model.attention import causal_attention
from minidist.full.model.gpt import Attend

FEW, MANY = 16, 4352  # Tokens on which outputs are compared, and at most for windows.


class Probe:
    """Asks a module's `attend`, once for each shape that it is called with, and before anything is
    sent.

    It does not keep the module alive.
    """

    def __init__(self, module: nn.Module, name: str, attend: Attend, way: str) -> None:
        self.module, self.name = weakref.ref(module), name
        self.attend, self.way = attend, way
        self.asked: set[Any] = set()

    def ask(self, query: Tensor, key: Tensor, tokens: int) -> None:
        """Raise ValueError unless `attend` is plain with heads like these, for as many tokens as
        all ranks have.
        """
        module = self.module()
        if module is None or query.is_meta or self.attend is causal_attention:
            return
        heads, groups = query.shape[1], key.shape[1]
        tokens = max(FEW, min(tokens, MANY) // FEW * FEW)
        question = heads, groups, query.shape[3], tokens, module.training
        if question in self.asked:
            return
        gpus = [query.device] if query.is_cuda else []
        with torch.random.fork_rng(gpus), torch.no_grad(), torch.autocast("cpu", enabled=False):
            fault = self._fault(heads, groups, query, tokens)
        if fault:
            raise ValueError(
                f"{self.name} {fault}, but {self.way} computes plain causal attention at 1/√d in "
                "its place: use SlidingWindow(n) for a window, or 'ulysses', which keeps the "
                "model's own attend"
            )
        self.asked.add(question)

    def _fault(self, heads: int, groups: int, like: Tensor, tokens: int) -> str:
        """Say how `attend` differs, in float64 on the CPU if it takes that; empty if it does not."""
        why: object = None
        for device, dtype in ((torch.device("cpu"), torch.float64), (like.device, like.dtype)):
            empty = torch.empty(like.shape[3], device=device, dtype=dtype)
            try:
                return self._difference(heads, groups, empty) or self._window(
                    heads, groups, empty, tokens
                )
            except Exception as error:  # Anything that a user's function may raise.
                why = error
        return f"cannot be tried ({type(why).__name__}: {str(why).partition(chr(10))[0]})"

    def _difference(self, heads: int, groups: int, like: Tensor) -> str:
        draws = torch.Generator().manual_seed(0)
        query, key, value = (
            torch.randn(1, count, FEW, len(like), generator=draws, dtype=torch.float64).to(like)
            for count in (heads, groups, groups)
        )
        with torch.enable_grad():
            found = self.attend(query, key, value)
        if found.requires_grad:
            return "has trained parameters of its own, which would get no gradient"
        if found.shape != query.shape:
            return f"returns {list(found.shape)} for queries {list(query.shape)}"
        # Some kernels compute their softmax in 32 bits, whatever they are given.
        tolerance = 1e-4 if like.itemsize >= 4 else 0.05
        apart = float((found - causal_attention(query, key, value)).abs().max())
        return "" if apart <= tolerance else f"differs by {apart:.2g} from outputs of about 1"

    def _window(self, heads: int, groups: int, like: Tensor, tokens: int) -> str:
        """Look whether the last token sees the first sixteenth: as queries are zeros, their mean is
        1/16. One head is enough, if `attend` takes one.
        """
        for queries, keys in ((1, 1), (heads, groups)):
            query = like.new_zeros(1, queries, tokens, len(like))
            value = like.new_zeros(1, keys, tokens, len(like))
            value[:, :, : tokens // FEW] = FEW
            try:
                seen = float(self.attend(query, torch.zeros_like(value), value)[0, 0, -1, 0])
            except Exception:
                if queries == heads:
                    raise
                continue
            if not abs(seen - 1) < 0.1:
                return f"has a window: the last of {tokens} tokens does not see the first"
            break
        return ""
