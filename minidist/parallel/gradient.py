"""Gradients that know that they are a part: what is asked of all of a gradient gets the answer of
all ranks.

    p.grad          this rank's block (tensor parallelism) or slice (ZeRO) of a gradient; memory, dtype, speed: as ever
    p.grad.mul_(2)  of this rank's elements, as of any tensor
    p.grad.norm()   of the *whole* gradient, the same on every rank: one all-reduce of one number

So lines that were written for one device stay right: `torch.nn.utils.clip_grad_norm_` asks for
norms, and `torch.amp.GradScaler` whether some element is infinite. DTensor does the same for all of
torch; here it is done for what `questions.py` names, and everything else runs on this rank's
elements. A question is collective: all ranks have to ask it. So a line that logs a norm must not
stand below `if rank == 0`. `gradient.as_subclass(torch.Tensor)` is the part alone.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from minidist.collectives import all_reduce
from minidist.comm import Communicator
from minidist.parallel.questions import (
    CLIP,
    COMPARED,
    JOINED,
    REFUSED,
    SCALE,
    elementwise,
    everywhere,
    for_each,
    named,
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
    mixed : bool
        Whether it was joined from gradients that are spread otherwise, or whole, so that no
        question has an answer.
    """

    axes: tuple[Communicator, ...]
    counts: bool = True
    staged: bool = False
    mixed: bool = False


class PartOfGradient(Tensor):
    """This rank's part of a gradient that is `spread` over ranks."""

    spread: Spread

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a question for the whole; let torch do anything else with the part, as with a
        plain tensor.
        """
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in ANSWERS:
                return ANSWERS[func](*args, **kwargs)
            result = func(*args, **kwargs)
        return kept(result, args, kwargs) if func in ELEMENTWISE else result

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


def kept(result: Any, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """Return what was made of each element of a part, as the same part of the whole's result."""
    if type(result) is Tensor and "out" not in options:
        for value in (*args, *options.values()):
            if isinstance(value, PartOfGradient) and value.numel() == result.numel():
                return become_part(result, value.spread)
    return result


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
    for part in parts:
        _refuse_mixed(part)
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


def _vector_norm(part: Tensor, *args: Any, **options: Any) -> Tensor:
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


def _any_norm(input: Tensor, p: Any = "fro", *args: Any, **options: Any) -> Tensor:
    """Answer `torch.norm`, `Tensor.norm` and `torch.linalg.norm`, of which only vectors' norms have
    an answer.
    """
    order = options.pop("ord", p)
    if order == "nuc":
        refuse("its nuclear norm")
    return _norm(input, 2 if order in ("fro", None) else order, *args, **options)


def _foreach_norm(
    parts: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    _refuse_stages(parts, CLIP)
    return tuple(norms_of_wholes(parts, float(ord), dtype))


# ---------------------------------------------------------------- other questions


def _unscale(parts: list[Tensor], found: Tensor, inverse: Tensor) -> None:
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


def _asked_of(ask: Any, op: str, nothing: float) -> Callable[..., Any]:
    """Return the answer to a question that one number answers, such as `Tensor.sum`; ranks join
    theirs by `op`.

    A rank without elements answers as if it had this `nothing`.
    """

    def answer(part: Any, *args: Any, **options: Any) -> Any:
        dtype = options.pop("dtype", None)
        if dtype is not None and not isinstance(part, PartOfGradient):
            options["dtype"] = dtype
        if _about_elements(part, args, options, ask.__name__):
            return kept(ask(part, *args, **options), (part, *args), options)
        _refuse_mixed(part)
        asked = part if part.numel() else part.new_full((1,), nothing)
        asked = asked if dtype is None else asked.to(dtype)
        found = ask(asked)
        if op == "sum" and not part.spread.counts:
            found = torch.zeros_like(found)
        joint = found.to(torch.uint8) if found.dtype == torch.bool else found.clone()
        for comm in part.spread.axes:
            all_reduce(joint, comm, op=op)
        return joint.to(found.dtype)

    return answer


def _about_elements(part: Any, args: Any, options: Any, question: str) -> bool:
    """Tell whether this asks for no whole: of a plain tensor, or of two tensors' elements. Along a
    dim, it would be one of the whole, and is refused.
    """
    if not isinstance(part, PartOfGradient) or (args and isinstance(args[0], Tensor)):
        return True
    if (args or options) and part.spread.axes:
        refuse(f"its {question} along a dim, or into out=,")
    return bool(args or options)


def _mean(part: Any, *args: Any, **options: Any) -> Any:
    """Answer `torch.mean`: the sum of all elements, divided by their number."""
    if _about_elements(part, args, options, "mean"):
        return torch.mean(part, *args, **options)
    ones = torch.ones(part.numel(), dtype=torch.float64, device=part.device)
    total = ANSWERS[torch.sum]
    return total(part) / total(become_part(ones, part.spread))


def _refuse_stages(parts: Iterable[Tensor], why: str) -> None:
    """Raise ValueError, on every rank, if ranks of a pipeline ask for all of their gradients."""
    if any(isinstance(part, PartOfGradient) and part.spread.staged for part in parts):
        raise ValueError(f"the stages of a pipeline have different gradients, and {why}")


def _refused(ask: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return what a question gets that would be answered for this rank's part alone."""

    def answer(*args: Any, **options: Any) -> Any:
        for value in tree_leaves((args, options)):
            _refuse_mixed(value)
            if isinstance(value, PartOfGradient) and value.spread.axes:
                refuse(f"its {name.strip('_')}")
        return ask(*args, **options)

    return answer


def _joined(join: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what several gradients are joined by: parts that are spread alike are one part then."""

    def answer(tensors: Sequence[Tensor], *args: Any, **options: Any) -> Tensor:
        joined = join(tensors, *args, **options)
        spreads = {part.spread for part in tensors if isinstance(part, PartOfGradient)}
        if "out" in options or not spreads:
            return joined
        alike = len(spreads) == 1 and all(isinstance(part, PartOfGradient) for part in tensors)
        return become_part(joined, spreads.pop() if alike else Spread((), mixed=True))

    return answer


def _refuse_mixed(part: Tensor) -> None:
    """Raise ValueError if a part was joined from gradients that are not spread alike."""
    if isinstance(part, PartOfGradient) and part.spread.mixed:
        refuse("what was joined from gradients of which others are whole or spread otherwise")


def _set(part: Tensor, index: Any, value: Any) -> None:
    """Answer `part[index] = value`: where the index would be one into the whole, it is refused."""
    _check_index(part, index)
    part[index] = value


def _get(part: Tensor, index: Any) -> Tensor:
    """Answer `part[index]`, which is a part again: elements that a mask has chosen add up, too."""
    _check_index(part, index)
    found = part[index]
    return become_part(found, part.spread) if isinstance(part, PartOfGradient) else found


def _check_index(part: Tensor, index: Any) -> None:
    """Raise ValueError unless an index means the same in a part as in the whole."""
    if isinstance(part, PartOfGradient):
        _refuse_mixed(part)
        places = index if isinstance(index, tuple) else (index,)
        if part.spread.axes and not all(everywhere(place, part) for place in places):
            refuse("where in it an index of the whole lies")


def _compared(ask: Callable[..., bool]) -> Callable[..., bool]:
    """Return the answer to whether two tensors are the same: all ranks must find it."""

    def answer(input: Tensor, other: Tensor, *args: Any, **options: Any) -> bool:
        for tensor in (input, other):
            _refuse_mixed(tensor)
        same = ask(input, other, *args, **options)
        joint = torch.tensor(
            [same],
            dtype=torch.uint8,
            device=input.device,
        )
        for comm in dict.fromkeys(axes_of((input, other))):
            all_reduce(joint, comm, op="min")
        return bool(joint)

    return answer


def _for_each(change: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is done to each of several gradients: parts stay parts."""

    def answer(*args: Any, **options: Any) -> Any:
        lists = []
        for given in (*args, *options.values()):
            if isinstance(given, list | tuple):
                lists.append(given)
        results = []
        for at, result in enumerate(change(*args, **options)):
            beside = [given[at] for given in lists]
            results.append(kept(result, beside, {}))
        return tuple(results)

    return answer


# ---------------------------------------------------------------- which question gets which answer


def _answers() -> dict[Any, Callable[..., Any]]:
    """Return the answer to each question about all of a gradient, by what of torch's asks it."""
    answers: dict[Any, Callable[..., Any]] = {
        torch._foreach_norm: _foreach_norm,
        torch.linalg.vector_norm: _vector_norm,
        torch.linalg.norm: _any_norm,
        torch.norm: _any_norm,
        Tensor.norm: _any_norm,
        Tensor.__getitem__: _get,
        Tensor.__setitem__: _set,
        torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
        torch.mean: _mean,
        Tensor.mean: _mean,
    }
    for join in (torch.cat, torch.concat, torch.hstack, torch.stack):
        answers[join] = _joined(join)
    for change in for_each():
        answers[change] = _for_each(change)
    for _, ask in named(COMPARED, torch, Tensor):
        answers[ask] = _compared(ask)
    for name, ask in named(" ".join(JOINED), torch, Tensor):
        answers[ask] = _asked_of(ask, *JOINED[name])
    for name, ask in named(REFUSED, torch, Tensor, torch.linalg, nn.functional):
        answers[ask] = _refused(ask, name)
    return answers


ANSWERS = _answers()
ELEMENTWISE = elementwise()
