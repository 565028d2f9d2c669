"""Compiled blocks: of a block's many small kernels, `torch.compile` makes a few large ones.

    block(x) ─▶ hooks: gather ─▶ forward, compiled ─▶ hooks: free ─▶ y

What is compiled is a block's `forward`, and not the module: `nn.Module.compile` would compile the
hooks of strategies, too, and so see parameters before they are gathered. All blocks of one shape
share what was compiled for the first.

What is no arithmetic runs as it is, between compiled pieces: messages, recomputation inside a
block, weight gradients that are put off, and dropout, whose mask depends on its place in the model.
(Ansel et al. 2024, "PyTorch 2".)
"""

from collections.abc import Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from minidist.full.adapters.lora import Stored
from minidist.full.context.blocks import Across
from minidist.full.layers.blocks import blocks_of
from minidist.full.mesh import Layout
from minidist.full.model.attention import capability
from minidist.full.model.dropout import Dropout
from minidist.full.recipe import Recipe
from minidist.full.recompute.segments import checkpoint
from minidist.full.strategy import Facts, Parallel, Strategy

AS_THEY_ARE = (
    "minidist.full.comm",
    "minidist.full.collectives",
    "minidist.full.precision.fp8",
    "minidist.full.precision.fp8_experts",
    "minidist.full.recompute",
    "minidist.full.model.moe",
    "minidist.full.model.seen",
    "minidist.full.adjoint",
    "minidist.full.expert",
    "minidist.full.pipeline.weight_gradients",
)
"""Modules that a compiler does not look into: it would make a graph for each layer, or break in
their midst.
"""


MOST_FORMS = 64
"""How often one function is compiled, for other shapes and layers of another form; later ones run
as they are.
"""


class Compiling(Strategy):
    """Compiles the forward of each block that a rank has."""

    def faults(self, recipe: Recipe, layout: Layout, facts: Facts) -> Iterator[str]:
        """Blocks and a compiler have to be there."""
        if recipe.compile and facts.layers < 1:
            yield f"compile={recipe.compile!r} is for a model with a list of `layers`: leave it out"
        if recipe.compile and (fault := compile_fault(recipe.compile)):
            yield fault

    def wanted(self, recipe: Recipe, layout: Layout, facts: Facts) -> bool:
        """A recipe says so."""
        return bool(recipe.compile)

    def apply(self, parallel: Parallel, checked: Any) -> None:
        """Compile each stage's blocks; where they are recomputed, each shape for itself."""
        dynamic = None if parallel.recipe.recompute == "none" else False
        for stage in parallel.stages.values():
            compile_blocks(blocks_of(stage), name_of(parallel.recipe.compile), dynamic)

    def undo(self, parallel: Parallel) -> None:
        """Run blocks as their classes say."""
        as_they_were(blocks_of(parallel.model))


def compile_blocks(
    blocks: Iterable[nn.Module], backend: str = "inductor", dynamic: bool | None = None
) -> None:
    """Have each block's `forward` compiled when it is first called, for the shapes that it is
    called with.

    A second shape compiles once more, and then for any shape. Apply it before or after a strategy
    wraps the model, but after tensor parallelism has replaced what is in the blocks. `as_they_were`
    undoes it.

    Parameters
    ----------
    blocks
        Such as `model.layers`, children of which are called as `block(x, ...)`.
    backend
        Of `torch.compile`: "inductor" needs a C++ compiler on CPUs, and Triton on GPUs; "aot_eager"
        needs nothing, and makes nothing faster.
    dynamic
        Of `torch.compile`. Say False with recomputation, whose second run must take what was
        compiled for the first: each shape is then compiled for itself.
    """
    leave_alone(AS_THEY_ARE)
    # Attention asks which GPU this is. The mark is made here, as it imports torch's compiler, which
    # takes a second.
    torch.compiler.assume_constant_result(capability)  # type: ignore[no-untyped-call]
    # Ranks that are threads of one process share what is compiled, and several may compile the same
    # at once. While one does, torch says of all that they compile, and the AdamW of another rank
    # has its bias corrections in float32: a parameter is off by some 1e-7 of itself. Replicas may
    # differ so where a step after the first compiles once more, for another shape.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_FORMS)
    # A list may be `Segments`, which is iterated part by part, each of them several blocks.
    several = blocks.children() if isinstance(blocks, nn.ModuleList) else blocks
    for block in several:
        for module in block.modules():
            if isinstance(module, Dropout) and module.rate:
                leave_alone((Dropout.__module__,))
            if isinstance(module, Stored):
                leave_alone(module.left_alone)
            if callable(attend := getattr(module, "attend", None)):
                module.attend = as_it_is(attend)
        block.forward = torch.compile(block.forward, backend=backend, dynamic=dynamic)


def as_it_is(attend: Any) -> Any:
    """Return an `attend` not compiled across ranks or if recomputed: two compilations would save in
    two orders.
    """
    if isinstance(attend, Across):
        return torch._dynamo.disable(attend)  # type: ignore[no-untyped-call]
    if isinstance(attend, partial) and attend.func is checkpoint:
        return partial(checkpoint, torch._dynamo.disable(attend.args[0]))  # type: ignore[no-untyped-call]
    return attend


def as_they_were(blocks: Iterable[nn.Module]) -> None:
    """Have blocks that were compiled run as their classes say."""
    for block in blocks:
        block.__dict__.pop("forward", None)


@cache
def leave_alone(modules: tuple[str, ...]) -> None:
    """Tell torch's compiler not to look into these modules."""
    for name in modules:
        torch._dynamo.trace_rules.add(name)


def name_of(backend: bool | str) -> str:
    """Return the name of a backend of `torch.compile`; True stands for its own."""
    return "inductor" if backend is True else str(backend)


def compile_fault(backend: bool | str) -> str:
    """Say in a sentence why blocks cannot be compiled by a backend; empty if they can."""
    name = name_of(backend)
    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        return f"there is no compiler {name!r}: use one of {', '.join(known)}"
    needed, found = _what_inductor_needs() if name == "inductor" else ("", True)
    return (
        ""
        if found
        else f"compile={backend!r} needs {needed}, and there is none: install it, or leave compile "
        "out"
    )


def _what_inductor_needs() -> tuple[str, bool]:
    """Return what compiles its kernels on this machine, and whether that is there."""
    if torch.cuda.is_available():
        from torch.utils._triton import has_triton

        return "Triton", has_triton()
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:  # of torch's own, without a public name
        return "a C++ compiler such as g++", False
    return "a C++ compiler such as g++", True
