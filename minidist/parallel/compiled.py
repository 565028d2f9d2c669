"""Compiled blocks: of a block's many small kernels, `torch.compile` makes a few large ones.

    block(x) ─▶ hooks: gather ─▶ forward, compiled ─▶ hooks: free ─▶ y

What is compiled is a block's `forward`, and not the module: `nn.Module.compile` would compile the hooks of strategies,
too, and so see parameters before they are gathered. All blocks of one shape share what was compiled for the first.

What is no arithmetic runs as it is, between compiled pieces: messages, recomputation inside a block, weight gradients
that are put off, and dropout, whose mask depends on its place in the model. (Ansel et al. 2024, "PyTorch 2".)
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from minidist.memory.recompute.segments import checkpoint
from minidist.model.dropout import Dropout

AS_THEY_ARE = (
    "minidist.comm",
    "minidist.collectives",
    "minidist.memory.recompute",
    "minidist.parallel.adjoint",
    "minidist.parallel.pipeline.weight_gradients",
)
"""Modules that a compiler does not look into: it would make a graph for each layer, or break in their midst."""


def compile_blocks(blocks: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Have each block's `forward` compiled when it is first called, for the shapes that it is called with.

    A second shape compiles once more, for any shape. Apply it to blocks that have their last form: before or after a
    strategy wraps the model, but after tensor parallelism has replaced what is in them. `as_they_were` undoes it.

    Parameters
    ----------
    blocks
        Such as `model.layers`, children of which are called as `block(x, ...)`.
    backend
        Of `torch.compile`: "inductor" needs a C++ compiler on CPUs, and Triton on GPUs; "aot_eager" needs nothing, and
        makes nothing faster.
    """
    leave_alone(AS_THEY_ARE)
    for block in blocks:
        for module in block.modules():
            if isinstance(module, Dropout) and module.rate:
                leave_alone((Dropout.__module__,))
            attend: Any = getattr(module, "attend", None)
            if isinstance(attend, partial) and attend.func is checkpoint:  # two compilations save in two orders
                plain: Any = torch._dynamo.disable(attend.args[0])  # type: ignore[no-untyped-call]
                module.attend = partial(checkpoint, plain)  # type: ignore[assignment]
        block.forward = torch.compile(block.forward, backend=backend)


def as_they_were(blocks: Iterable[nn.Module]) -> None:
    """Have blocks that were compiled run as their classes say."""
    for block in blocks:
        block.__dict__.pop("forward", None)


@cache
def leave_alone(modules: tuple[str, ...]) -> None:
    """Tell torch's compiler not to look into these modules."""
    rules: Any = torch._dynamo.trace_rules
    for name in modules:
        rules.add(name)


def missing_compiler(backend: bool | str) -> str:
    """Say in a sentence what this machine lacks to compile for its CPU; empty if it lacks nothing."""
    if torch.cuda.is_available() or backend not in (True, "inductor"):
        return ""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # of torch's own, without a public name
        return f"compile=True needs a C++ compiler, and there is none ({error}): install g++, or leave it out"
    return ""
