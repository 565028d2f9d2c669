"""Gradients that know that they are a part: what is asked of all of a gradient gets the answer of
all ranks.

    p.grad          this rank's block (tensor parallelism) or slice (ZeRO) of a gradient
    p.grad.mul_(2)  of this rank's elements, and so are all steps of an elementwise optimizer
    p.grad.norm()   of the *whole* gradient, the same on every rank: one all-reduce of one number
    p.grad[0]       refused, as is all that `questions.py` does not list

So lines that were written for one device stay right: `torch.nn.utils.clip_grad_norm_` asks for
norms, and `torch.amp.GradScaler` whether some element is infinite. A question is collective: all
ranks have to ask it. So a line that logs a norm must not stand below `if rank == 0`.
`gradient.as_subclass(torch.Tensor)` is the part alone.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator
from minidist.full.gradients.questions import (
    ABOUT_SHAPE,
    ALONE,
    CLIP,
    ELEMENTWISE,
    JOINED,
    SCALE,
    name_of,
    operation,
    refuse,
)


@dataclass(frozen=True)
class Spread:
    """Among which ranks a gradient is spread.

    Attributes
    ----------
    axes : tuple of Communicator
        Along each of them ranks hold other parts.
    counts : bool
        Whether this rank's part enters sums. If several ranks hold the same part, only the first
        one's does.
    staged : bool
        Whether other ranks hold other parameters, as the stages of a pipeline do. What asks for
        many gradients at a time, to clip or to unscale them, would then get another answer on each
        stage, and is refused.
    """

    axes: tuple[Communicator, ...]
    counts: bool = True
    staged: bool = False


class PartOfGradient(Tensor):
    """This rank's part of a gradient that is `spread` over ranks."""

    spread: Spread

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a question for the whole, and let torch do with the part what it can do with one
        element after the other; refuse anything else.
        """
        answer: Any = ANSWERS.get(name_of(func), _of_elements)
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(func, torch._ops.OpOverload):
                return func(*args, **kwargs)  # A dispatch mode repeats what was answered.
            return answer(func, *args, **kwargs)


def become_part(gradient: Tensor, spread: Spread) -> Tensor:
    """Make a tensor, in place, a part of a gradient; return it."""
    gradient.__class__ = PartOfGradient
    gradient.spread = spread  # type: ignore[attr-defined]
    return gradient


def _of_elements(func: Any, *args: Any, **options: Any) -> Any:
    """Return what torch makes of this rank's elements: a part again, unless a list says that it is
    about the shape, or a copy.
    """
    name, values = operation(func), [*args, *options.values()]
    known = name in ELEMENTWISE or name in ABOUT_SHAPE or name in ALONE
    if not (known or name.startswith(".is_")):
        refuse(f"its {name}")
    result = func(*args, **options)
    there = result is None or any(result is value for value in values)  # It was done in place.
    if there or name not in ELEMENTWISE:
        return result
    if isinstance(result, Tensor):
        return _kept(result, values)
    lists = [value if isinstance(value, list | tuple) else repeat(None) for value in values]
    return tuple(_kept(*each) for each in zip(result, zip(*lists, strict=False), strict=False))


def _kept(result: Tensor, values: Iterable[Any]) -> Tensor:
    """Return what was made of each element of a part, as the same part of the whole's result."""
    parts = [value for value in values if isinstance(value, PartOfGradient)]
    if not parts:
        return result
    if result.numel() != parts[0].numel():
        refuse("what is done with a tensor of another shape, not this part's,")
    return become_part(result, parts[0].spread)


# ---------------------------------------------------------------- norms


def _norms_of_wholes(
    parts: Sequence[Tensor], order: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """Return the norm of each gradient, of which these are this rank's parts.

    A plain tensor is whole.

    Collective: one all-reduce for each axis along which some are spread, of a number for each of
    these. Sums are in float32 at least, as the square of a norm beyond 255 has no float16.
    """
    if any(part.requires_grad for part in parts) and torch.is_grad_enabled():
        fault = (
            "this gradient is to be differentiated again, but its norm is that of parts on "
            "several ranks"
        )
        raise RuntimeError(f"{fault}, and no graph leads there: ask for it under torch.no_grad()")
    terms = [_term(part, order, dtype) for part in parts]
    by_axes: dict[tuple[Communicator, ...], list[int]] = {}
    for at, part in enumerate(parts):
        if isinstance(part, PartOfGradient):
            by_axes.setdefault(part.spread.axes, []).append(at)
    join = "sum" if math.isfinite(order) else "max"
    for axes, several in by_axes.items():
        joint = torch.stack([terms[at] for at in several])
        for comm in axes:
            all_reduce(joint, comm, op=join)
        for at, term in zip(several, joint.unbind(), strict=True):
            terms[at] = term
    root = 1 / order if math.isfinite(order) else 1
    return tuple(
        (term**root).to(dtype or part.dtype) for term, part in zip(terms, parts, strict=True)
    )


def _term(part: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    """Return what this rank adds: the sum of |x|^order of its elements; or the largest one."""
    wide = torch.promote_types(dtype or part.dtype, torch.float32)
    counts = not isinstance(part, PartOfGradient) or part.spread.counts
    if not part.numel() or not counts:
        return part.new_zeros((), dtype=wide)
    norm: Tensor = torch.linalg.vector_norm(part, order, dtype=wide)
    return norm**order if math.isfinite(order) else norm


def _norm(
    ask: Any, part: Tensor, p: Any = 2, *dim: Any, dtype: torch.dtype | None = None, **options: Any
) -> Tensor:
    """Answer `torch.norm`, `Tensor.norm`, and those of `torch.linalg`, by the plain norm of all
    elements.
    """
    if ask is torch.linalg.vector_norm:  # `clip_grad_norm_` asks so for one after the other.
        _refuse_stages([part], CLIP)
    order = options.pop("ord", p)
    order = 2.0 if order in ("fro", None) else order
    asks = [value for value in options.values() if value is not None and value is not False]
    if isinstance(order, str) or order <= 0 or dim or asks:
        refuse("a norm along a dim, into out=, or of an order that is not above 0,")
    return _norms_of_wholes([part], float(order), dtype)[0]


def _foreach_norm(
    _: Any, parts: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    _refuse_stages(parts, CLIP)
    return _norms_of_wholes(parts, float(ord), dtype)


# ---------------------------------------------------------------- other questions


def _unscale(_: Any, parts: list[Tensor], found: Tensor, inverse: Tensor) -> None:
    """Multiply by the inverse scale; find out whether an element was infinite, or not a number, on
    any rank.
    """
    _refuse_stages(parts, SCALE)
    torch._amp_foreach_non_finite_check_and_unscale_(parts, found, inverse)
    spreads = [part.spread for part in parts if isinstance(part, PartOfGradient)]
    for comm in dict.fromkeys(comm for spread in spreads for comm in spread.axes):
        all_reduce(found, comm, op="max")


def _asked(ask: Callable[..., Any], part: Any, *args: Any, **options: Any) -> Any:
    """Answer a question that one number answers, such as `Tensor.sum`: ranks join theirs as `JOINED`
    says.
    """
    if args or options or not isinstance(part, PartOfGradient):
        refuse(f"its {ask.__name__} along a dim, or with another tensor,")
    op, nothing = JOINED[ask.__name__]
    found = ask(part if part.numel() else part.new_full((1,), nothing))
    if op == "sum" and not part.spread.counts:
        found = torch.zeros_like(found)
    joint = found.to(torch.uint8) if found.dtype == torch.bool else found.clone()
    for comm in part.spread.axes:
        all_reduce(joint, comm, op=op)
    return joint.to(found.dtype)


def _set(_: Any, target: Tensor, mask: Any, value: Any) -> None:
    """Answer `target[mask] = value`; any other index would be one into the whole."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != target.shape:
        refuse("where in it an index of the whole lies")
    target[mask] = value


def _refuse_stages(parts: Iterable[Tensor], why: str) -> None:
    """Raise ValueError, on every rank, if ranks of a pipeline ask for all of their gradients."""
    if any(isinstance(part, PartOfGradient) and part.spread.staged for part in parts):
        raise ValueError(f"the stages of a pipeline have different gradients, and {why}")


ANSWERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(JOINED, _asked),
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm"), _norm),
    "__setitem__": _set,
    "_foreach_norm": _foreach_norm,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
"""The answer to each question about all of a gradient, by the name of what of torch's asks it."""
