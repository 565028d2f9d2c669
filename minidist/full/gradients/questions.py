"""What torch can ask of a gradient, by name. Everything else is refused, also what is new in torch.

    g.abs().max()      `ELEMENTWISE`: still this rank's part, of |g|; then `JOINED`: the largest of all ranks
    g.clone()          `ALONE`: a plain tensor with this rank's part
    g[0], g.normal_()  in no list: a place in the whole, and this rank does not know where its part
                       begins; numbers that ranks would draw apart

`gradient.py` has the answers. A name stands for the function of `torch`, the method and the
operator, for what works in place, and for lists: `mul`, `mul_`, `__rmul__`, `_foreach_mul_`.
"""

import math
from typing import Any, NoReturn

JOINED: dict[str, tuple[str, float]] = {
    "sum": ("sum", 0),
    "any": ("max", 0),
    "all": ("min", 1),
    "max": ("max", -math.inf),
    "min": ("min", math.inf),
}
"""Questions that one number answers: how ranks join theirs, and what one without elements brings."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _names("""
    mul div truediv add sub rsub pow square sqrt rsqrt reciprocal abs neg sign
    clamp clamp_min clamp_max maximum minimum lerp addcmul addcdiv where nan_to_num
    isfinite isnan isinf eq ne gt ge lt le and or invert
    detach to cpu cuda float double half bfloat16 flatten view reshape view_as .data
""")
"""What makes a part of the whole's result out of a part."""

ABOUT_SHAPE = _names("""
    size dim numel stride element_size is_same_size len hash
    is_floating_point is_complex is_contiguous is_inference is_neg is_conj get_device result_type
    is_view is_shared is_pinned pin_memory record_stream storage
    has_compatible_shallow_copy_type untyped_storage data_ptr storage_offset
    .shape .dtype .device .layout .ndim .is_sparse .is_cuda .is_cpu .is_meta .is_leaf .is_nested .is_quantized
    .names
    ._backward_hooks ._post_accumulate_grad_hooks
    .grad ._grad .grad_fn ._version .itemsize .nbytes .output_nr .requires_grad .retains_grad
    requires_grad register_hook register_post_accumulate_grad_hook
    zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full new_tensor
""")
"""What needs no values."""

ALONE = _names("""
    as_subclass clone copy zero fill repr format fused_adam fused_adamw fused_sgd fused_adagrad
""")
"""What torch makes of this rank's part alone."""


def name_of(func: Any) -> str:
    """Return the name of a function of torch, or of a property that is read or set."""
    name: str = func.__name__
    return func.__self__.__name__ if name in ("__get__", "__set__", "__delete__") else name


def operation(func: Any) -> str:
    """Return what a function of torch does, by its name in the lists; properties have a dot."""
    if (name := name_of(func)) != func.__name__:
        return f".{name}"
    name = name.strip("_").removeprefix("foreach_")
    return name if name in ELEMENTWISE or name[1:] not in ELEMENTWISE else name[1:]


CLIP = (
    "their norm is not that of all: use clip_by_global_norm(parameters, limit), or "
    "Parallel.clip(limit)"
)
SCALE = "only some may overflow: use LossScaler(mesh.world) in place of GradScaler"


def refuse(what: str) -> NoReturn:
    """Raise ValueError for a question that no sum over ranks answers."""
    raise ValueError(
        f"this rank has only a part of the gradient, and {what} is not computed across ranks: ask "
        "for the norm of all of it, or use gradient.as_subclass(torch.Tensor), the part, with "
        "others cut alike by placement_of(slice).slice.take(whole)"
    )
