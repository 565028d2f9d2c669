"""What torch can ask of a gradient, by name: what ranks answer together, what is refused, and what
keeps a part a part.

    g.abs().max()      `ELEMENTWISE`: still this rank's part, of |g|; then `JOINED`: the largest of all ranks
    g[0]               `REFUSED`: an index into the whole, and this rank does not know where its part begins
    g.clone()          in no list: what torch makes of this rank's part, a plain tensor

`gradient.py` has the answers. Names are those of `torch`, `torch.Tensor`, `torch.linalg` and
`torch.nn.functional`, wherever they are found.
"""

import math
from collections.abc import Iterator
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

COMPARED = "equal allclose"
"""Whether two tensors are the same, which all ranks must find."""

REFUSED = """
    std var std_mean var_mean median nanmedian quantile nanquantile prod mode
    argmax argmin aminmax topk kthvalue sort argsort msort cumsum cumprod cummax cummin
    count_nonzero nansum nanmean logsumexp logcumsumexp softmax log_softmax _foreach_max _foreach_powsum
    histc histogram bincount unique unique_consecutive cov corrcoef renorm

    item tolist numpy __array__ __float__ __int__ __bool__ __contains__
    select narrow narrow_copy index_select gather take take_along_dim masked_select
    split split_with_sizes tensor_split chunk unbind hsplit vsplit dsplit unfold
    nonzero nonzero_static argwhere diagonal diag trace tril triu
    roll flip fliplr flipud rot90 diff gradient repeat tile

    dot vdot inner vecdot outer matmul __matmul__ __rmatmul__ linear
    mm mv bmm addmm addmv baddbmm einsum tensordot multi_dot kron cross
    matrix_norm matrix_rank matrix_power matrix_exp cond det logdet slogdet inv inverse pinv
    pinverse qr svd svdvals svd_lowrank eig eigvals eigh eigvalsh cholesky lu solve lstsq

    dist cdist pairwise_distance cosine_similarity normalize
    mse_loss l1_loss smooth_l1_loss huber_loss
"""
"""Questions that no sum over ranks answers, and places in the whole."""

FUNCTIONS = """
    mul multiply div divide true_divide floor_divide remainder fmod add sub subtract
    pow float_power square sqrt rsqrt reciprocal abs absolute neg negative positive sign sgn
    clamp clip clamp_min clamp_max maximum minimum fmax fmin where masked_fill
    exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh asinh atan atan2 erf sigmoid
    relu lerp addcmul addcdiv copysign hypot xlogy round floor ceil trunc frac
    isfinite isnan isinf isposinf isneginf signbit nan_to_num isclose
    eq ne gt ge lt le greater greater_equal less less_equal not_equal
    logical_and logical_or logical_xor logical_not
    detach flatten reshape ravel squeeze unsqueeze
    t transpose swapaxes swapdims movedim moveaxis permute
"""
METHODS = """
    view view_as reshape_as contiguous
    to type float double half bfloat16 bool int long cpu cuda
    __mul__ __truediv__ __floordiv__ __mod__ __pow__ __add__ __sub__ __and__ __or__ __xor__
    __rmul__ __rtruediv__ __rpow__ __radd__ __rsub__ __rand__ __ror__ __rxor__
    __neg__ __pos__ __abs__ __invert__ __eq__ __ne__ __gt__ __ge__ __lt__ __le__
"""
PROPERTIES = "data T mT H mH"
"""What makes a part of the whole's result out of a part: `FUNCTIONS` are methods, too."""

PLAIN_LISTS = "_foreach_norm _foreach_max _foreach_powsum _foreach_mm _foreach_clone"
"""What of `torch._foreach_...` does not make a part of each part."""


def named(names: str, *homes: Any) -> Iterator[tuple[str, Any]]:
    """Yield each of these names, with what is called so in each of the `homes` that know it."""
    for name in names.split():
        for home in homes:
            if hasattr(home, name):
                yield name, getattr(home, name)


def elementwise() -> set[Any]:
    """Return what is done to each element, or to the shape, on the way from a gradient to a
    question.
    """
    found = {function for _, function in named(FUNCTIONS, torch, Tensor)}
    found |= {method for _, method in named(METHODS, Tensor)}
    return found | {value.__get__ for _, value in named(PROPERTIES, Tensor)}


def for_each() -> list[Any]:
    """Return what is done to each tensor of a list, and not in place."""
    plain = PLAIN_LISTS.split()
    names = [name for name in dir(torch) if name.startswith("_foreach_") and name not in plain]
    return [getattr(torch, name) for name in names if not name.endswith("_")]


CLIP = (
    "their norm is not that of all: use clip_by_global_norm(parameters, limit), or "
    "Parallel.clip(limit)"
)
SCALE = "only some may overflow: use LossScaler(mesh.world) in place of GradScaler"


def refuse(what: str) -> NoReturn:
    """Raise ValueError for a question that no sum over ranks answers."""
    fault = f"this rank has only a part of the gradient, and {what} is not computed across ranks"
    raise ValueError(
        f"{fault}: ask for the norm of all of it, or use gradient.as_subclass(torch.Tensor), the "
        "part"
    )


def everywhere(place: Any, part: Tensor) -> bool:
    """Tell whether an index names no place, or has a number for each element."""
    if isinstance(place, Tensor):
        return place.dtype == torch.bool and place.shape == part.shape
    if isinstance(place, slice):
        return place == slice(None)
    return place is None or place is Ellipsis
