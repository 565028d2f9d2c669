"""Recomputation beyond `plain.py`: the graph stays autograd's own, so hooks and second derivatives work and nothing has
to be named; inputs and outputs of any kind, autocast, GPUs; and policies that group the blocks of a model.

    forward     x ──▶ function ──▶ y     autograd saves an empty object in place of each tensor; x is kept
    backward    tensor n is wanted ──▶ function(x) once more, up to the last tensor saved ──▶ the n-th of them

The plain page's function runs a backward of its own within backward. What the function captures then gets no gradient
unless it is named, hooks run twice, and DDP takes the inner end for the end. Here gradients flow and hooks run as
ever; our autograd function only keeps the inputs. Parameters are not kept at all: the second run meets them as they
are then, gathered anew by ZeRO's hooks, say. It runs the forward hooks of modules again, but stops early: those it
stops in are entered and never left.

In segments of k of the L blocks the peak is k * A + (ceil(L/k) - 1) * c bytes, and c for the gradient that comes in: c
is a block's input, and A all that a block saves, its input among it. Cost in time: one more forward, less what follows
the last tensor saved (in a block of the GPT, the last matrix product). (Chen et al. 2016, section 4.)
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from minidist.memory.recompute.chain import Plan, in_segments, stages_of

P = ParamSpec("P")
R = TypeVar("R")


def checkpoint(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return `function(*args, **kwargs)`, and compute it again in backward.

    Parameters
    ----------
    function
        Does the same whenever it is called: autocast and torch's default generators (of the CPU, and of the GPUs where
        the inputs are) are set as they were; another generator would draw other numbers, and statistics of batch norm
        are updated twice. It may use `checkpoint` itself.
    args, kwargs
        Its inputs, tensors or not, also in tuples, lists and dictionaries. They are all that is kept.

    Raises
    ------
    RuntimeError
        In backward, if the second run saves other tensors than the first, or if an input was changed in place.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    call = Call(function, *tree_flatten((args, kwargs)))
    with saved_tensors_hooks(call.leave_out, call.bring_back):
        return function(*args, **kwargs)


def recompute(
    model: nn.Module, policy: str | Plan, layers: str = "layers", sizes: tuple[int, int] | None = None
) -> None:
    """Have `model` recompute from now on, by this policy alone. Apply it after the other strategies.

    Parameters
    ----------
    model : nn.Module
        Calls the blocks in `layers` one after the other, as `x = block(x, ...)` in a loop over them. Parameters stay,
        and so do their names.
    policy : {"none", "full", "selective", "every K", "sqrt"} or Plan
        "full" recomputes each block from its input, "every 3" segments of three. "sqrt" takes the length that needs
        the least memory. "selective" recomputes only the core of attention (Korthikanti et al. 2022, section 5). A plan
        groups the numbers of the blocks: `((0, 1), 2)` recomputes 0 and 1 from the input of 0; see `chain`.
    layers : str
        Name of the `nn.ModuleList`.
    sizes : (int, int), optional
        For "sqrt": what `measure_block` returns. Without it both are taken as equal, as in the textbook: √L blocks.

    Raises
    ------
    ValueError
        If the model has no such list, or the policy does not fit it.
    """
    parent, _, name = layers.rpartition(".")
    owner = dict(model.named_modules()).get(parent)
    found = getattr(owner, name, None)
    if not isinstance(found, nn.ModuleList) or not len(found):
        raise ValueError(
            f"{type(model).__name__} has no nn.ModuleList named {layers!r} with blocks in it: name it with layers="
        )
    blocks = list(found.children())
    plan = _plan(policy, len(blocks), sizes) if isinstance(policy, str) else policy
    if stages_of(plan) != list(range(len(blocks))):
        raise ValueError(
            f"the plan {plan} names blocks {stages_of(plan)}, not 0 to {len(blocks) - 1} in order: plan for this model"
        )
    _recompute_attention(blocks, policy == "selective")
    setattr(owner, name, Segments(found, plan))


class Segments(nn.ModuleList):
    """The same blocks under the same names; a loop over them gets what `plan` makes of them: blocks and segments."""

    def __init__(self, blocks: nn.ModuleList, plan: Plan) -> None:
        super().__init__()
        self._modules, self.plan = dict(blocks._modules), plan  # a stage of a pipeline has some of the numbers only

    def __iter__(self) -> Iterator[Any]:
        """Yield functions to be called in turn, each with what the one before returned."""
        return iter(self._parts(self.plan))

    def __getitem__(self, index: Any) -> Any:
        """Return a block; or, for the slice of all blocks, what a loop over them gets."""
        if not isinstance(index, slice):
            return super().__getitem__(index)
        chosen = list(range(len(self))[index])
        if chosen != stages_of(self.plan):
            raise ValueError(f"blocks {chosen} of the plan {self.plan}: take a slice before recompute, not after it")
        return self

    def _parts(self, plan: Plan) -> list[Callable[..., Any]]:
        blocks = list(self.children())
        return [blocks[part] if isinstance(part, int) else self._segment(part) for part in plan]

    def _segment(self, plan: Plan) -> Callable[..., Any]:
        return partial(checkpoint, partial(segment, self._parts(plan)))


def best_interval(layers: int, block_input_bytes: int, block_activation_bytes: int) -> int:
    """Return the k that makes k * A + ceil(layers/k) * c smallest: blocks to recompute together."""

    def peak(k: int) -> int:
        return k * block_activation_bytes + -(-layers // k) * block_input_bytes

    return min(range(1, layers + 1), key=peak)


def measure_block(block: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> tuple[int, int]:
    """Return the bytes c of `x` and A of all that `block(x, ...)` saves for backward, each storage once.

    Parameters, buffers and the other inputs do not count: they are there anyway.
    """
    others = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    there = {tensor.untyped_storage()._cdata for tensor in [*block.parameters(), *block.buffers(), *others]}
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.detach()  # which keeps the address taken
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
        block(x.detach().requires_grad_(), *args, **kwargs)
    return x.nbytes, sum(saved[key].untyped_storage().nbytes() for key in saved.keys() - there)


class Inputs(torch.autograd.Function):
    """Keeps tensors as autograd does: changes in place are noticed, and an enclosing checkpoint sees them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        """Save `tensors`; the empty result only leads to them, and torch 2.11 drops them when it goes."""
        ctx.save_for_backward(*tensors)
        return anchor.clone()


class Enough(BaseException):
    """Ends a second run: all that was asked for is there. Not an `Exception`, which a function might catch."""


class Missing:
    """Autograd keeps one in place of each tensor, and drops it when it would drop the tensor."""


class Call:
    """A function and its inputs, how the first run went, and what a second one has brought back."""

    def __init__(self, function: Callable[..., Any], leaves: list[Any], structure: TreeSpec) -> None:
        self.function, self.structure = function, structure
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensors = [leaves[place] for place in self.places]
        self.inputs: Any = Inputs.apply(torch.empty(0, requires_grad=True), *tensors)  # type: ignore[no-untyped-call]
        gpus = {tensor.device for tensor in tensors if tensor.is_cuda}
        self.random_state = torch.get_rng_state()
        self.random_states = {gpu: torch.cuda.get_rng_state(gpu) for gpu in gpus}
        self.autocast = [_autocast_as_now(kind) for kind in {"cpu", *(gpu.type for gpu in gpus)}]
        self.saved: list[tuple[weakref.ref[Missing], torch.Size, torch.dtype]] = []
        self.again: MutableMapping[Missing, Tensor] = weakref.WeakKeyDictionary()

    def leave_out(self, tensor: Tensor) -> Missing:
        """Let autograd save something else."""
        missing = Missing()
        self.saved.append((weakref.ref(missing), tensor.shape, tensor.dtype))
        return missing

    def bring_back(self, missing: Missing) -> Tensor:
        """Give the tensor to autograd, which asks for each once; if it asks again, it keeps its graph."""
        if missing not in self.again:
            self.again = self.run_again()
        return self.again.pop(missing)

    def run_again(self) -> MutableMapping[Missing, Tensor]:
        """Return all that the function saves, but for what autograd has dropped meanwhile."""
        again: MutableMapping[Missing, Tensor] = weakref.WeakKeyDictionary()
        found = 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal found
            if found < len(self.saved):  # else the function has caught Enough, and goes on
                reference, shape, dtype = self.saved[found]
                found += 1
                if (tensor.shape, tensor.dtype) != (shape, dtype):
                    raise self.other_than(f"{tensor.dtype} {list(tensor.shape)}", found)
                if missing := reference():
                    again[missing] = tensor.detach()
            if found == len(self.saved):
                raise Enough
            return tensor.detach()  # an operation that saved its own output would keep itself alive

        leaves = list(self.others)
        # Detached: what the function does to its inputs, such as hooking them, is not done to the graph twice.
        for place, tensor in zip(self.places, self.inputs.grad_fn.saved_tensors, strict=True):
            leaves[place] = tensor.detach().requires_grad_(tensor.requires_grad)
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
        """Say that the runs differ."""
        function = self.function.func if isinstance(self.function, partial) else self.function
        name = getattr(function, "__name__", type(function).__name__)
        (_, shape, dtype), count = self.saved[number - 1], len(self.saved)
        return RuntimeError(
            f"the checkpointed {name} saved {dtype} {list(shape)} for backward as tensor {number} of {count}, "
            f"but {found} when run again: make it do the same both times"
        )


def segment(parts: list[Callable[..., Any]], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what the last of `parts` makes of what the one before made of ... `x`."""
    for part in parts:
        x = part(x, *args, **kwargs)
    return x


def _plan(policy: str, layers: int, sizes: tuple[int, int] | None) -> Plan:
    """Turn the name of a policy into a plan."""
    every = re.fullmatch(r"every (\d+)", policy)
    if policy in ("none", "selective"):
        return tuple(range(layers))
    if policy == "full":
        length = 1
    elif policy == "sqrt":
        length = best_interval(layers, *sizes) if sizes else round(layers**0.5)
    elif every:
        length = int(every[1])
    else:
        raise ValueError(f"unknown policy {policy!r}: use none, full, selective, every K, sqrt, or a plan")
    if not 1 <= length <= layers:
        raise ValueError(f"{policy!r} of {layers} blocks: segments have 1 to {layers} of them")
    return in_segments([min(length, layers - start) for start in range(0, layers, length)])


def _recompute_attention(blocks: list[nn.Module], wanted: bool) -> None:
    """Recompute the core of attention in each block, or, as before any policy, do not."""
    for number, block in enumerate(blocks):
        attention: Any = getattr(block, "attention", None)
        attend: Any = getattr(attention, "attend", None)
        if isinstance(attend, partial) and attend.func is checkpoint:
            attention.attend = attend = attend.args[0]
        if wanted and not callable(attend):
            raise ValueError(
                f"'selective' recomputes the function attention.attend of each block, and block {number}, a "
                f"{type(block).__name__}, has none: use 'full' or 'every K'"
            )
        if wanted:
            attention.attend = partial(checkpoint, attend)


def _autocast_as_now(kind: str) -> torch.autocast:
    return torch.autocast(
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )
