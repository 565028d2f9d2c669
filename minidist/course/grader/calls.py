"""Which collectives an answer's forward and backward call: for the lessons that cut layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minidist.course.grader.contract import Array, Note, Wrong
from minidist.full.collectives import COLLECTIVES
from minidist.full.comm.communicator import Communicator
from minidist.full.trace import Trace


def forward_backward(
    comm: Communicator,
    forward: Callable[[], Tensor],
    leaves: Mapping[str, Tensor],
    gradient: Tensor | None,
) -> dict[str, Any]:
    """Return what `forward` gives, the gradients of the leaves, and the collectives of forward and
    of backward.
    """
    comm.trace = trace = Trace()
    for leaf in leaves.values():
        leaf.requires_grad_()
    out = forward()
    before = calls(trace)
    if gradient is not None and out.shape != gradient.shape:
        raise Wrong(
            f"what forward returns has shape {tuple(out.shape)}, expected {tuple(gradient.shape)}"
        )
    try:
        torch.autograd.backward(out, gradient)
    except RuntimeError as error:
        if "gradient" not in str(error) or "Backward" not in str(error):
            raise
        why = (
            "backward of a Function returns one value for each argument of forward after ctx, as "
            "large as it is"
        )
        raise Wrong(f"autograd takes no such gradient, {error}: {why}") from None
    found = {
        "out": out.detach().numpy(),
        "forward": before,
        "backward": calls(trace)[len(before) :],
    }
    for name, leaf in leaves.items():
        if leaf.grad is None:
            raise Wrong(
                f"backward left no gradient of {name} here: nothing that this rank returned "
                "depends on it"
            )
        found[f"the gradient of {name}"] = leaf.grad.numpy()
    return found


def calls(trace: Trace) -> list[list[int]]:
    """Return the collectives so far: of each its place in `COLLECTIVES`, and the bytes of its whole
    buffer.
    """
    found = [
        (event.name.split()[0], event.bytes) for event in trace.events if event.kind == "collective"
    ]
    return [[COLLECTIVES.index(name), bytes] for name, bytes in found]


def spelled(rows: Array) -> str:
    """Return calls in words."""
    return (
        ", ".join(f"{COLLECTIVES[int(row[0])]} of {int(row[1])} bytes" for row in rows)
        or "no collective"
    )


def expect_collectives(notes: Sequence[Note]) -> None:
    """Raise `Wrong` if something was sent other than by a collective, where the trace does not see
    it.
    """
    for note in notes:
        plain = note.kind in ("send", "all_gather_object", "allocate")
        if plain and not any(name.startswith("minidist.full.collectives") for name in note.through):
            raise Wrong(f"{note.line} uses comm.{note.kind}: use the collectives only")
