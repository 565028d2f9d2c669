"""Gradients that know that they are a part: what is asked of all of a gradient gets the answer of
all ranks.

    p.grad          this rank's block (tensor parallelism) or slice (ZeRO) of a gradient; memory, dtype, speed: as ever
    p.grad.mul_(2)  of this rank's elements, as of any tensor
    p.grad.norm()   of the *whole* gradient, the same on every rank: one all-reduce of one number

So lines that were written for one device stay right: `torch.nn.utils.clip_grad_norm_` asks for
norms, and `torch.amp.GradScaler` whether some element is infinite. DTensor does the same for all of
torch; here it is done for the questions in `ANSWERS`, and everything else runs on this rank's
elements. A question is collective: all ranks have to ask it. So a line that logs a norm must not
stand below `if rank == 0`. `gradient.as_subclass(torch.Tensor)` is the part alone.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from minidist.collectives import all_reduce
from minidist.comm import Communicator


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
        if func in ELEMENTWISE and type(result) is Tensor and "out" not in kwargs:
            part = next((value for value in args if isinstance(value, cls)), None)
            if part is not None and part.numel() == result.numel():
                return become_part(result, part.spread)
        return result

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
            return ask(part, *args, **options)
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


CLIP = (
    "their norm is not that of all: use clip_by_global_norm(parameters, limit), or "
    "Parallel.clip(limit)"
)
SCALE = "only some may overflow: use LossScaler(mesh.world) in place of GradScaler"


def _refuse_stages(parts: Iterable[Tensor], why: str) -> None:
    """Raise ValueError, on every rank, if ranks of a pipeline ask for all of their gradients."""
    if any(isinstance(part, PartOfGradient) and part.spread.staged for part in parts):
        raise ValueError(f"the stages of a pipeline have different gradients, and {why}")


def refuse(what: str) -> NoReturn:
    """Raise ValueError for a question that no sum over ranks answers."""
    fault = f"this rank has only a part of the gradient, and {what} is not computed across ranks"
    raise ValueError(
        f"{fault}: ask for the norm of all of it, or use gradient.as_subclass(torch.Tensor), the "
        "part"
    )


def _refused(ask: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return what a question gets that would be answered for this rank's part alone."""

    def answer(*args: Any, **options: Any) -> Any:
        given = tree_leaves((args, options))
        if any(isinstance(value, PartOfGradient) and value.spread.axes for value in given):
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
    if isinstance(index, Tensor):
        everywhere = index.dtype == torch.bool and index.shape == part.shape
    else:
        everywhere = index is Ellipsis or (isinstance(index, slice) and index == slice(None))
    if not everywhere and isinstance(part, PartOfGradient) and part.spread.axes:
        refuse("where in it an index of the whole lies")
    part[index] = value


# ---------------------------------------------------------------- which question gets which answer

JOINED: dict[str, tuple[str, float]] = {
    "sum": ("sum", 0),
    "any": ("max", 0),
    "all": ("min", 1),
    "max": ("max", -math.inf),
    "amax": ("max", -math.inf),
    "min": ("min", math.inf),
    "amin": ("min", math.inf),
}
"""Questions that one number answers: how ranks join theirs, and what one without elements brings."""

REFUSED = """
    std var std_mean var_mean median nanmedian quantile prod histc
    argmax argmin aminmax topk kthvalue sort argsort cumsum cumprod
    count_nonzero nansum nanmean logsumexp softmax log_softmax matrix_norm

    dot vdot inner vecdot outer matmul __matmul__ __rmatmul__ linear
    mm mv bmm addmm addmv einsum tensordot multi_dot

    dist cdist pairwise_distance cosine_similarity normalize
    mse_loss l1_loss smooth_l1_loss huber_loss
"""
"""Questions that no sum over ranks answers."""

FUNCTIONS = """
    mul div pow square sqrt abs neg sign add sub clamp detach
    isfinite isnan isinf nan_to_num eq ne gt ge lt le
    exp log log2 log10 rsqrt reciprocal relu clamp_min clamp_max
    maximum minimum where logical_and logical_or logical_not
    flatten reshape ravel squeeze unsqueeze
"""
METHODS = """
    view view_as reshape_as contiguous
    to type float double half bfloat16 cpu cuda
    __mul__ __truediv__ __pow__ __add__ __sub__ __and__ __or__ __xor__
    __rmul__ __rtruediv__ __rpow__ __radd__ __rsub__ __rand__ __ror__ __rxor__
    __neg__ __invert__ __eq__ __ne__ __gt__ __ge__ __lt__ __le__
"""
"""What makes a part of the whole's result out of a part: `FUNCTIONS` are methods, too."""


def _answers() -> dict[Any, Callable[..., Any]]:
    """Return the answer to each question about all of a gradient, by what of torch's asks it."""
    answers: dict[Any, Callable[..., Any]] = {
        torch._foreach_norm: _foreach_norm,
        torch.linalg.vector_norm: _vector_norm,
        torch.linalg.norm: _any_norm,
        torch.norm: _any_norm,
        Tensor.norm: _any_norm,
        Tensor.__setitem__: _set,
        torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
        torch.mean: _mean,
        Tensor.mean: _mean,
    }
    for join in (torch.cat, torch.concat, torch.hstack, torch.stack):
        answers[join] = _joined(join)
    for name, (op, nothing) in JOINED.items():
        for home in (torch, Tensor):
            ask = getattr(home, name)
            answers[ask] = _asked_of(ask, op, nothing)
    for name in REFUSED.split():
        for home in (torch, Tensor, torch.linalg, nn.functional):
            if hasattr(home, name):
                ask = getattr(home, name)
                answers[ask] = _refused(ask, name)
    return answers


def _elementwise() -> set[Any]:
    """Return what is done to each element, or to the shape, on the way from a gradient to a
    question.
    """
    functions = [getattr(torch, name) for name in FUNCTIONS.split()]
    methods = [getattr(Tensor, name) for name in (FUNCTIONS + METHODS).split()]
    data = Tensor.data.__get__  # type: ignore[attr-defined]
    return {data, *functions, *methods}


ANSWERS = _answers()
ELEMENTWISE = _elementwise()
