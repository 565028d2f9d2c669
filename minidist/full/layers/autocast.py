"""torch's autocast around the forward of what a rank has, as a strategy: what most people write.

    parameters, gradients, optimizer     float32
    products, attention                  16 bits: autocast makes copies of weights and inputs
    norms, the residual stream, loss     float32

Against a whole model in 16 bits there are no masters to keep, and gradients are summed over ranks in
32 bits: twice the bytes. A weight costs 4 bytes, its gradient 4, AdamW's moments 8; and 2 more for
the copy that a forward makes of it, which lives as long as autograd needs it: until backward
(`copy_bytes` of `tests/gpt_activations.py`). A pipeline has such copies for each microbatch in flight. With
ZeRO 3 they are whole on every rank, although the weights they were made of are freed: recomputation
frees them, too, layer by layer. Each product makes a copy of its input, so query, key and value
save three of one tensor, gate and up two.

torch would also keep the copies of weights in a cache until forward ends, for layers that are
called twice. Here each is called once, and the cache is off: it would keep all that recomputation
leaves out.

What goes from stage to stage is the residual stream, in float32. What tensor parallelism sums in
forward are outputs of products, in 16 bits, and in backward gradients of the norms' output, in
float32; ZeRO 3 gathers weights in float32. (Micikevicius et al. 2018; `torch.autocast`.)
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from minidist.full.mesh import Layout
from minidist.full.recipe import Recipe, RecipeError
from minidist.full.strategy import Facts, Parallel, Strategy

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Autocast(Strategy):
    """Runs each stage's forward under `torch.autocast`."""

    def faults(self, recipe: Recipe, layout: Layout, facts: Facts) -> Iterator[str]:
        """It has a dtype of 16 bits, and nothing else chooses that of products."""
        if not recipe.autocast:
            return
        if recipe.autocast not in DTYPES:
            yield f"autocast={recipe.autocast!r} is no dtype of 16 bits: use {' or '.join(DTYPES)}"
        if recipe.fp8:
            yield (
                f"autocast={recipe.autocast!r} chooses the dtype of products, which 8 bits (fp8) "
                "choose for themselves: leave one of them out"
            )

    def wanted(self, recipe: Recipe, layout: Layout, facts: Facts) -> bool:
        """A recipe says so."""
        return bool(recipe.autocast)

    def apply(self, parallel: Parallel, checked: Any) -> None:
        """Enter autocast before each forward, and leave it behind.

        Raises
        ------
        RecipeError
            On a device without autocast, such as `meta`.
        """
        dtype = DTYPES[parallel.recipe.autocast]
        device = next(parallel.model.parameters()).device
        if not torch.amp.is_autocast_available(device.type):
            raise RecipeError(
                f"autocast={parallel.recipe.autocast!r} needs a device that torch has autocast for, "
                f"and {device} is none: use the CPU or a GPU"
            )
        for stage in parallel.stages.values():
            Around(stage, dtype)

    def words(self, recipe: Recipe, mesh: Any) -> str:
        """Name it."""
        return f"autocast ({recipe.autocast})"


class Around:
    """Autocast from the beginning of a module's forward to its end, however that ends."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.entered: list[ExitStack] = []
        module.register_forward_pre_hook(self.enter)
        module.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, inputs: Any) -> None:
        """Begin."""
        device = next(module.parameters()).device.type
        stack = ExitStack()
        stack.enter_context(torch.autocast(device, self.dtype, cache_enabled=False))
        self.entered.append(stack)

    def leave(self, *_: Any) -> None:
        """End."""
        self.entered.pop().close()
