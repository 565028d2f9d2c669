"""What torch can ask of a gradient, by name: what ranks answer together, and what runs on this rank's
elements. Everything else is refused.

    g.abs().max()      `ELEMENTWISE`: still this rank's part, of |g|; then `JOINED`: the largest of all ranks
    g.clone()          `PLAIN`: what torch makes of this rank's part, a plain tensor
    g[0], g.normal_()  in no list: a place in the whole, and this rank does not know where its part
                       begins; numbers that ranks would draw apart

`gradient.py` has the answers. A name stands for the function of `torch` and the method, for what
works in place, and for lists: `mul`, `mul_`, `_foreach_mul_`.
"""

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

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


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _names("""
    mul multiply div divide true_divide floor_divide remainder fmod add sub subtract rsub
    pow float_power square sqrt rsqrt reciprocal abs absolute neg negative positive sign sgn
    clamp clip clamp_min clamp_max maximum minimum fmax fmin where masked_fill
    exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh asinh atan atan2 erf erfc sigmoid
    relu softplus gelu silu lerp addcmul addcdiv copysign hypot xlogy logaddexp
    round floor ceil trunc frac isfinite isnan isinf isposinf isneginf signbit nan_to_num isclose
    eq ne gt ge lt le greater greater_equal less less_equal not_equal
    logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not
    detach conj resolve_conj resolve_neg flatten reshape ravel squeeze unsqueeze
    t transpose swapaxes swapdims movedim moveaxis permute
    view view_as reshape_as contiguous
    to type float double half bfloat16 bool int long cpu cuda
    __mul__ __truediv__ __floordiv__ __mod__ __pow__ __add__ __sub__ __and__ __or__ __xor__
    __rmul__ __rtruediv__ __rpow__ __radd__ __rsub__ __rand__ __ror__ __rxor__
    __neg__ __pos__ __abs__ __invert__ __eq__ __ne__ __gt__ __ge__ __lt__ __le__
    data T mT H mH
""")
"""What makes a part of the whole's result out of a part."""

ABOUT_SHAPE = _names("""
    size dim numel nelement stride element_size is_same_size __len__ __hash__
    is_floating_point is_complex is_contiguous is_inference is_neg is_conj get_device result_type
    _has_compatible_shallow_copy_type untyped_storage data_ptr storage_offset
    requires_grad register_hook register_post_accumulate_grad_hook
    zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full new_tensor
""")
"""What needs no values."""

PLAIN = ABOUT_SHAPE | _names("""
    __repr__ __format__ __dir__ as_subclass clone copy zero fill retain_grad
    __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__ __iadd__ __isub__ __iand__ __ior__ __ixor__
    _fused_adam _fused_adamw _fused_sgd _fused_adagrad
    _is_view is_shared is_pinned pin_memory record_stream storage
""")
"""What torch makes of this rank's part."""


def name_of(func: Any) -> str:
    """Return the name of a function of torch, or of a property that is read or set."""
    return str(func.__self__.__name__ if is_accessor(func) else func.__name__)


def is_accessor(func: Any) -> bool:
    """Tell whether a function reads, sets or deletes a property."""
    return func.__name__ in ("__get__", "__set__", "__delete__")


CLIP = (
    "their norm is not that of all: use clip_by_global_norm(parameters, limit), or "
    "Parallel.clip(limit)"
)
SCALE = "only some may overflow: use LossScaler(mesh.world) in place of GradScaler"


ASK = "ask for the norm of all of it, or use gradient.as_subclass(torch.Tensor), the part"
CUT = (
    "cut the other tensor like the gradient, by placement_of(slice).slice.take(whole) or "
    "placement_of(parameter).block.take(whole)"
)


def refuse(what: str, fix: str = ASK) -> NoReturn:
    """Raise ValueError for a question that no sum over ranks answers."""
    fault = f"this rank has only a part of the gradient, and {what} is not computed across ranks"
    raise ValueError(f"{fault}: {fix}")


def everywhere(place: Any, part: Tensor) -> bool:
    """Tell whether an index names no place, or has a number for each element."""
    if isinstance(place, Tensor):
        return place.dtype == torch.bool and place.shape == part.shape
    if isinstance(place, slice):
        return place == slice(None)
    return place is None or place is Ellipsis
