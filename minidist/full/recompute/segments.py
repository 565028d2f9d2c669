"""Recomputation of any function: the graph stays autograd's own, so hooks and second derivatives
work and parameters need not be listed. It takes inputs and outputs of any kind, autocast and GPUs,
and has policies for a model's blocks.

    forward     x ──▶ function ──▶ y            autograd saves an empty object in place of each tensor; x is kept
    backward    autograd asks for tensor n ──▶ run function(x) again, up to the last saved tensor ──▶ return the n-th

The book's page runs a backward of its own within backward. So parameters that it does not list get
no gradient, hooks run twice, and DDP takes the end of the inner backward for the end. Here
gradients flow and hooks run as usual; our autograd function only keeps the inputs. Parameters are
not kept at all: the second run uses their values at that time, which ZeRO's hooks may just have
gathered. The second run also runs the forward hooks of modules, but it stops early: the modules
that it stops in have a forward pre-hook and no forward hook.

With segments of k of the L blocks the peak is k * A + (ceil(L/k) - 1) * c bytes, and c more for the
incoming gradient. Here c is the size of a block's input, and A the size of all that a block saves,
its input included. Cost in time: one more forward, except what follows the last saved tensor (in a
block of the GPT, the last matrix product). (Chen et al. 2016, section 4.)
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

P = ParamSpec("P")
R = TypeVar("R")
Plan: TypeAlias = "tuple[int | Plan, ...]"
"""Blocks in order: a number is stored; a tuple is recomputed from its input, by the plan inside
it.
"""


def checkpoint(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return `function(*args, **kwargs)`, and compute it again in backward.

    Parameters
    ----------
    function
        Must do the same at each call. The second run restores autocast and torch's default
        generators (of the CPU, and of the GPUs that hold inputs). Another generator would draw
        other numbers, and statistics of batch norm are updated twice. The function may use
        `checkpoint` itself.
    args, kwargs
        Its inputs: tensors and other values, also in tuples, lists and dictionaries. Nothing else
        is kept.

    Raises
    ------
    RuntimeError
        In backward, if the second run saves other tensors than the first, or if an input was
        changed in place.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    call = Call(function, *tree_flatten((args, kwargs)))
    with saved_tensors_hooks(call.leave_out, call.bring_back):
        return function(*args, **kwargs)


def recompute(
    model: nn.Module,
    policy: str | Plan,
    layers: str = "layers",
    sizes: tuple[int, int] | None = None,
) -> None:
    """Make `model` recompute by this policy, which replaces an earlier one. Apply it after the
    other strategies.

    Parameters
    ----------
    model : nn.Module
        Must call the blocks in `layers` in a loop, as `x = block(x, ...)`. Parameters and their
        names stay the same.
    policy : {"none", "full", "selective", "every K", "sqrt"} or Plan
        "full" recomputes each block from its input, "every 3" segments of three blocks. "sqrt" uses
        the segment length that needs the least memory. "selective" recomputes only the core of
        attention (Korthikanti et al. 2022, section 5). A plan groups block numbers: `((0, 1), 2)`
        recomputes 0 and 1 from the input of 0.
    layers : str
        Name of the `nn.ModuleList`.
    sizes : (int, int), optional
        For "sqrt": the result of `measure_block`. Without it both sizes count as equal, as in the
        textbook: √L blocks.

    Raises
    ------
    ValueError
        If the model has no such list, or the policy does not fit it.
    """
    found = dict(model.named_modules(remove_duplicate=False)).get(layers)
    if not isinstance(found, nn.ModuleList) or not len(found):
        raise ValueError(
            f"{type(model).__name__} has no nn.ModuleList named {layers!r} with blocks: set layers="
        )
    blocks = list(found.children())
    plan = _plan(policy, len(blocks), sizes) if isinstance(policy, str) else policy
    if (named := stages_of(plan)) != list(range(len(blocks))):
        raise ValueError(
            f"{plan} names blocks {named}, not 0 to {len(blocks) - 1} in order: plan for this model"
        )
    _recompute_attention(blocks, policy == "selective")
    model.set_submodule(layers, Segments(found, plan))


class Segments(nn.ModuleList):
    """The same blocks under the same names. A loop over them gets the parts of `plan`: blocks and
    segments.
    """

    def __init__(self, blocks: nn.ModuleList, plan: Plan) -> None:
        super().__init__()
        # a pipeline stage has only some of the names
        self._modules, self.plan = dict(blocks._modules), plan

    def __iter__(self) -> Iterator[Any]:
        """Yield functions to call in turn, each with the result of the one before."""
        return iter(self._parts(self.plan))

    def __getitem__(self, index: Any) -> Any:
        """Return a block; for the slice of all blocks, return this list, whose loop yields the
        parts of the plan.
        """
        if not isinstance(index, slice):
            return super().__getitem__(index)
        chosen = list(range(len(self))[index])
        if chosen != stages_of(self.plan):
            raise ValueError(
                f"blocks {chosen} of the plan {self.plan}: take a slice before recompute, not "
                "after it"
            )
        return self

    def _parts(self, plan: Plan) -> list[Callable[..., Any]]:
        blocks = list(self.children())
        return [
            blocks[part]
            if isinstance(part, int)
            else partial(checkpoint, partial(segment, self._parts(part)))
            for part in plan
        ]


def best_interval(layers: int, block_input_bytes: int, block_activation_bytes: int) -> int:
    """Return the number k of blocks to recompute together that makes k * A + ceil(layers/k) * c
    smallest.
    """
    return min(
        range(1, layers + 1),
        key=lambda k: k * block_activation_bytes + -(-layers // k) * block_input_bytes,
    )


def measure_block(block: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> tuple[int, int]:
    """Return the bytes c of `x`, and the bytes A of all that `block(x, ...)` saves for backward,
    each storage once.

    Parameters, buffers and the other inputs do not count: they exist anyway.
    """
    others = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    there = {
        tensor.untyped_storage()._cdata
        for tensor in [*block.parameters(), *block.buffers(), *others]
    }
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        # holding it keeps its address from being reused
        saved[tensor.untyped_storage()._cdata] = tensor.detach()
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
        block(x.detach().requires_grad_(), *args, **kwargs)
    return x.nbytes, sum(saved[key].untyped_storage().nbytes() for key in saved.keys() - there)


class Inputs(torch.autograd.Function):
    """Keeps tensors as autograd does: it notices changes in place, and an enclosing checkpoint sees
    them.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        """Save `tensors`. The empty result leads to them, and torch drops them when it is freed."""
        ctx.save_for_backward(*tensors)
        return anchor.clone()


class Enough(BaseException):
    """Ends a second run that has all tensors. It is not an `Exception`, because a function might
    catch that.
    """


class Missing:
    """Stands for a saved tensor: autograd keeps this object instead, and drops it when it would
    drop the tensor.
    """


class Call:
    """A function, its inputs, the record of its first run, and the tensors from a second run."""

    def __init__(
        self, function: Callable[..., Any], leaves: list[Any], structure: TreeSpec
    ) -> None:
        self.function, self.structure = function, structure
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # `inputs` has the tensors
        self.leaves = [Inputs if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.inputs: Any = Inputs.apply(torch.empty(0, requires_grad=True), *tensors)  # type: ignore[no-untyped-call]
        gpus = {tensor.device for tensor in tensors if tensor.is_cuda}
        self.random_state = torch.get_rng_state()
        self.random_states = {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus}
        self.autocast = [_autocast_as_now(kind) for kind in {"cpu", *(gpu.type for gpu in gpus)}]
        self.saved: list[tuple[weakref.ref[Missing], torch.Size, torch.dtype]] = []
        self.again: MutableMapping[Missing, Tensor] = weakref.WeakKeyDictionary()

    def leave_out(self, tensor: Tensor) -> Missing:
        """Give autograd a `Missing` to save instead of a tensor."""
        missing = Missing()
        self.saved.append((weakref.ref(missing), tensor.shape, tensor.dtype))
        return missing

    def bring_back(self, missing: Missing) -> Tensor:
        """Return the tensor to autograd. It asks for each once, or again if it retains its
        graph.
        """
        if missing not in self.again:
            self.again = self.run_again()
        return self.again.pop(missing)

    def run_again(self) -> MutableMapping[Missing, Tensor]:
        """Run the function again, and return the tensors that it saves and autograd still needs."""
        again: MutableMapping[Missing, Tensor] = weakref.WeakKeyDictionary()
        found = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal found
            if found < len(self.saved):  # otherwise the function has caught Enough and goes on
                reference, shape, dtype = self.saved[found]
                found += 1
                if (tensor.shape, tensor.dtype) != (shape, dtype):
                    raise self.other_than(f"{tensor.dtype} {list(tensor.shape)}", found)
                if missing := reference():
                    again[missing] = tensor.detach()
            if found == len(self.saved):
                raise Enough
            return tensor.detach()  # an operation that saved its own output would keep itself alive

        # Detached, so that hooks which the function puts on its inputs do not run twice in the
        # outer graph.
        inputs = (
            tensor.detach().requires_grad_(tensor.requires_grad)
            for tensor in self.inputs.grad_fn.saved_tensors
        )
        leaves = [next(inputs) if leaf is Inputs else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        with ExitStack() as stack:
            stack.enter_context(suppress(Enough))
            stack.enter_context(torch.random.fork_rng(self.random_states))
            torch.set_rng_state(self.random_state)
            for gpu, state in self.random_states.items():
                torch.cuda.set_rng_state(state, gpu)
            for autocast in self.autocast:
                stack.enter_context(autocast)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
            self.function(*args, **kwargs)
        if found < len(self.saved):
            raise self.other_than("nothing", found + 1)
        return again

    def other_than(self, found: str, number: int) -> RuntimeError:
        """Return the error that says how the second run differs."""
        function = self.function.func if isinstance(self.function, partial) else self.function
        name = getattr(function, "__name__", type(function).__name__)
        _, shape, dtype = self.saved[number - 1]
        first = f"{dtype} {list(shape)} for backward as tensor {number} of {len(self.saved)}"
        fix = "make it do the same both times"
        return RuntimeError(
            f"the checkpointed {name} saved {first}, but {found} when run again: {fix}"
        )


def segment(parts: list[Callable[..., Any]], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `x` after all `parts`, each called with the result of the one before and the other
    arguments.
    """
    for part in parts:
        x = part(x, *args, **kwargs)
    return x


def stages_of(plan: Plan) -> list[int]:
    """Return the blocks of a plan without its parentheses."""
    blocks: list[int] = []
    for part in plan:
        if isinstance(part, int):
            blocks.append(part)
        else:
            blocks += stages_of(part)
    return blocks


def _plan(policy: str, layers: int, sizes: tuple[int, int] | None) -> Plan:
    """Return the plan of a named policy."""
    every = re.fullmatch(r"every (\d+)", policy)
    if policy in ("none", "selective"):
        return tuple(range(layers))
    best = best_interval(layers, *sizes) if sizes else round(layers**0.5)
    length = int(every[1]) if every else {"full": 1, "sqrt": best}.get(policy)
    if length is None:
        raise ValueError(
            f"unknown policy {policy!r}: use none, full, selective, every K, sqrt, or a plan"
        )
    if not 1 <= length <= layers:
        raise ValueError(f"{policy!r} of {layers} blocks: segments have 1 to {layers} of them")
    return tuple(
        tuple(range(start, min(start + length, layers))) for start in range(0, layers, length)
    )


def _recompute_attention(blocks: list[nn.Module], wanted: bool) -> None:
    """Wrap the core of attention in each block in a checkpoint if `wanted`; otherwise remove such
    wrappers.
    """
    for number, block in enumerate(blocks):
        attention: Any = getattr(block, "attention", None)
        attend: Any = getattr(attention, "attend", None)
        if isinstance(attend, partial) and attend.func is checkpoint:
            attention.attend = attend = attend.args[0]
        if wanted and not callable(attend):
            lacks = f"block {number}, a {type(block).__name__}, has none"
            raise ValueError(
                f"'selective' recomputes attention.attend, and {lacks}: use 'full' or 'every K'"
            )
        # it was compiled: two compilations would save in two orders
        if wanted and "forward" in vars(block):
            attend = torch._dynamo.disable(attend)  # type: ignore[no-untyped-call]
        if wanted:
            attention.attend = partial(checkpoint, attend)


def _autocast_as_now(kind: str) -> torch.autocast:
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    return torch.autocast(kind, dtype, enabled, cache_enabled=torch.is_autocast_cache_enabled())
