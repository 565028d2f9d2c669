"""Gradients that know that they are a part: what is asked of all of a gradient gets the answer of
all ranks.

    p.grad          this rank's block (tensor parallelism) or slice (ZeRO) of a gradient; memory, dtype, speed: as ever
    p.grad.mul_(2)  of this rank's elements, as of any tensor
    p.grad.norm()   of the *whole* gradient, the same on every rank: one all-reduce of one number

So lines that were written for one device stay right: `torch.nn.utils.clip_grad_norm_` asks for
norms, and `torch.amp.GradScaler` whether some element is infinite. DTensor does the same for all of
torch; here it is done for what `questions.py` lists, and everything else is refused. A question is
collective: all ranks have to ask it. So a line that logs a norm must not stand below `if rank == 0`.
`gradient.as_subclass(torch.Tensor)` is the part alone.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator
from minidist.full.gradients.questions import (
    ASK,
    CLIP,
    CUT,
    ELEMENTWISE,
    JOINED,
    PLAIN,
    SCALE,
    everywhere,
    is_accessor,
    name_of,
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
        with torch._C.DisableTorchFunctionSubclass():
            return answer(func, *args, **kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a plain copy: ranks cannot be copied."""
        copy = self.as_subclass(Tensor).clone()
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled as a plain tensor: ranks cannot be saved."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def become_part(gradient: Tensor, spread: Spread) -> Tensor:
    """Make a tensor, in place, a part of a gradient; return it."""
    gradient.__class__ = PartOfGradient
    gradient.spread = spread  # type: ignore[attr-defined]
    return gradient


OTHER_SHAPE = "what is done with a tensor of another shape, not this part's,"


def kept(result: Any, args: Iterable[Any]) -> Any:
    """Return what was made of each element of a part, as the same part of the whole's result."""
    if type(result) is Tensor:
        for value in args:
            if isinstance(value, PartOfGradient) and value.numel() == result.numel():
                return become_part(result, value.spread)
        _refuse_parts(args, OTHER_SHAPE, CUT)
    return result


def _of_elements(func: Any, *args: Any, **options: Any) -> Any:
    """Return what torch makes of this rank's elements; refuse what no list names, and tensors that
    are no part of the same gradient.
    """
    name, values = name_of(func), [*args, *options.values()]
    dunder = name.startswith("__")
    base = name if dunder else name.removeprefix("_foreach_").removesuffix("_")
    if not (base in ELEMENTWISE or base in PLAIN or is_accessor(func)):
        _refuse_parts(values, f"its {name.strip('_')}")
    try:
        result = func(*args, **options)
    except RuntimeError as error:
        if "shape" in str(error) or "size" in str(error):
            _refuse_parts(values, OTHER_SHAPE, CUT)
        raise
    in_place = name.endswith("_") and not dunder
    if base not in ELEMENTWISE or in_place or "out" in options:
        return result
    if isinstance(result, list | tuple):
        lists = [value for value in values if isinstance(value, list | tuple)]
        return tuple(
            kept(each, [it[at] for it in lists] or values) for at, each in enumerate(result)
        )
    return kept(result, values)


def _refuse_parts(values: Any, what: str, fix: str = ASK) -> None:
    """Raise ValueError if some of these are parts of which other ranks have the rest."""
    for value in tree_leaves(values):
        if isinstance(value, PartOfGradient) and value.spread.axes:
            refuse(what, fix)


# ---------------------------------------------------------------- norms


def norms_of_wholes(
    parts: Sequence[Tensor], order: float, dtype: torch.dtype | None = None
) -> list[Tensor]:
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
    for axes, several in by_axes.items():
        joint = torch.stack([terms[at] for at in several])
        for comm in axes:
            all_reduce(joint, comm, op=_join(order))
        for at, term in zip(several, joint.unbind(), strict=True):
            terms[at] = term
    root = 1 / order if order and math.isfinite(order) else 1
    return [(term**root).to(dtype or part.dtype) for term, part in zip(terms, parts, strict=True)]


def _join(order: float) -> str:
    """Return the reduction that joins the ranks' terms of a norm."""
    if math.isfinite(order):
        return "sum"
    return "max" if order > 0 else "min"


def _term(part: Tensor, order: float, dtype: torch.dtype | None) -> Tensor:
    """Return what this rank adds: the sum of |x|^order of its elements; for infinite orders, the
    extreme one.
    """
    wide = torch.promote_types(dtype or part.dtype, torch.float32)
    counts = not isinstance(part, PartOfGradient) or part.spread.counts
    if not part.numel() or not counts:
        return part.new_full((), math.inf if order == -math.inf else 0, dtype=wide)
    norm: Tensor = torch.linalg.vector_norm(part, order, dtype=wide)
    return norm**order if order and math.isfinite(order) else norm


def _vector_norm(_: Any, part: Tensor, *args: Any, **options: Any) -> Tensor:
    """Answer `torch.linalg.vector_norm`, with which `clip_grad_norm_` asks for one gradient after
    the other.
    """
    _refuse_stages([part], CLIP)
    return _norm(part, *args, **options)


def _norm(
    part: Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, **options: Any
) -> Tensor:
    """Return the norm of all of a gradient, if the options are those of a plain norm."""
    if dim is not None or keepdim or options.get("out") is not None:
        refuse("a norm along a dim, or into out=")
    (norm,) = norms_of_wholes([part], float(ord), options.get("dtype"))
    return norm


def _any_norm(_: Any, input: Tensor, p: Any = "fro", *args: Any, **options: Any) -> Tensor:
    """Answer `torch.norm`, `Tensor.norm` and `torch.linalg.norm`, of which only vectors' norms have
    an answer.
    """
    order = options.pop("ord", p)
    if order == "nuc":
        refuse("its nuclear norm")
    return _norm(input, 2 if order in ("fro", None) else order, *args, **options)


def _foreach_norm(
    _: Any, parts: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    _refuse_stages(parts, CLIP)
    return tuple(norms_of_wholes(parts, float(ord), dtype))


# ---------------------------------------------------------------- other questions


def _unscale(_: Any, parts: list[Tensor], found: Tensor, inverse: Tensor) -> None:
    """Multiply by the inverse scale; find out whether an element was infinite, or not a number, on
    any rank.
    """
    _refuse_stages(parts, SCALE)
    torch._amp_foreach_non_finite_check_and_unscale_(parts, found, inverse)
    for comm in dict.fromkeys(axes_of(parts)):
        all_reduce(found, comm, op="max")


def axes_of(tensors: Iterable[Tensor]) -> Iterable[Communicator]:
    """Yield the axes along which these are spread, in the same order on every rank."""
    for part in tensors:
        if isinstance(part, PartOfGradient):
            yield from part.spread.axes


def _asked(ask: Callable[..., Any], part: Any, *args: Any, **options: Any) -> Any:
    """Answer a question that one number answers, such as `Tensor.sum`: ranks join theirs as `JOINED`
    says.
    """
    op, nothing = JOINED[ask.__name__]
    dtype = options.pop("dtype", None)
    if dtype is not None and not isinstance(part, PartOfGradient):
        options["dtype"] = dtype
    if _about_elements(part, args, options, ask.__name__):
        return kept(ask(part, *args, **options), (part, *args))
    asked = part if part.numel() else part.new_full((1,), nothing)
    asked = asked if dtype is None else asked.to(dtype)
    found = ask(asked)
    if op == "sum" and not part.spread.counts:
        found = torch.zeros_like(found)
    joint = found.to(torch.uint8) if found.dtype == torch.bool else found.clone()
    for comm in part.spread.axes:
        all_reduce(joint, comm, op=op)
    return joint.to(found.dtype)


def _about_elements(part: Any, args: Any, options: Any, question: str) -> bool:
    """Tell whether this asks for no whole: of a plain tensor, or of two tensors' elements. Along a
    dim, it would be one of the whole, and is refused.
    """
    if not isinstance(part, PartOfGradient) or (args and isinstance(args[0], Tensor)):
        return True
    if (args or options) and part.spread.axes:
        refuse(f"its {question} along a dim, or into out=,")
    return bool(args or options)


def _mean(ask: Any, part: Any, *args: Any, **options: Any) -> Any:
    """Answer `torch.mean`: the sum of all elements, divided by their number."""
    if _about_elements(part, args, options, "mean"):
        return ask(part, *args, **options)
    ones = torch.ones(
        part.numel(),
        dtype=torch.float64,
        device=part.device,
    )
    total = _asked(torch.sum, part)
    return total / _asked(torch.sum, become_part(ones, part.spread))


def _refuse_stages(parts: Iterable[Tensor], why: str) -> None:
    """Raise ValueError, on every rank, if ranks of a pipeline ask for all of their gradients."""
    if any(isinstance(part, PartOfGradient) and part.spread.staged for part in parts):
        raise ValueError(f"the stages of a pipeline have different gradients, and {why}")


def _joined(join: Any, tensors: Sequence[Tensor], *args: Any, **options: Any) -> Tensor:
    """Return what several gradients are joined to: parts that are spread alike are one part then."""
    joined: Tensor = join(tensors, *args, **options)
    spreads = {part.spread for part in tensors if isinstance(part, PartOfGradient)}
    if "out" in options or not spreads:
        return joined
    if len(spreads) > 1 or not all(isinstance(part, PartOfGradient) for part in tensors):
        refuse("what is joined from gradients of which others are whole or spread otherwise")
    return become_part(joined, spreads.pop())


def _set(_: Any, part: Tensor, index: Any, value: Any) -> None:
    """Answer `part[index] = value`: where the index would be one into the whole, it is refused."""
    _check_index(part, index)
    part[index] = value


def _get(_: Any, part: Tensor, index: Any) -> Tensor:
    """Answer `part[index]`, which is a part again: elements that a mask has chosen add up, too."""
    _check_index(part, index)
    found = part[index]
    return become_part(found, part.spread) if isinstance(part, PartOfGradient) else found


def _check_index(part: Tensor, index: Any) -> None:
    """Raise ValueError unless an index means the same in a part as in the whole."""
    if isinstance(part, PartOfGradient):
        places = index if isinstance(index, tuple) else (index,)
        if part.spread.axes and not all(everywhere(place, part) for place in places):
            refuse("where in it an index of the whole lies")


def _compared(ask: Any, input: Tensor, other: Tensor, *args: Any, **options: Any) -> bool:
    """Return the answer to whether two tensors are the same: all ranks must find it."""
    same = ask(input, other, *args, **options)
    joint = torch.tensor(
        [same],
        dtype=torch.uint8,
        device=input.device,
    )
    for comm in dict.fromkeys(axes_of((input, other))):
        all_reduce(joint, comm, op="min")
    return bool(joint)


ANSWERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(JOINED, _asked),
    **dict.fromkeys(("equal", "allclose"), _compared),
    **dict.fromkeys(("cat", "concat", "concatenate", "hstack", "stack"), _joined),
    **dict.fromkeys(("norm", "linalg_norm"), _any_norm),
    "linalg_vector_norm": _vector_norm,
    "_foreach_norm": _foreach_norm,
    "mean": _mean,
    "__getitem__": _get,
    "__setitem__": _set,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
"""The answer to each question about all of a gradient, by the name of what of torch's asks it."""
