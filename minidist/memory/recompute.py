"""Recomputation: backward runs the forward again instead of having kept what it saved ("gradient checkpointing").

    forward     x ──▶ function ──▶ y     autograd saves numbers 0, 1, 2, ... in place of tensors; x is kept
    backward    number n is wanted ──▶ function(x) once more, up to the last tensor saved ──▶ the n-th of them

In segments of k of the L blocks the peak is k * A + (ceil(L/k) - 1) * c bytes, and c for the gradient that comes in: c
is a block's input, and A all that a block saves, its input among it. Cost in time: one more forward, less what follows
the last tensor saved (in a block of the GPT, the last matrix product). (Chen et al. 2016, "Training deep nets with
sublinear memory cost", section 4.)

Why not an autograd function that runs a backward of its own within backward? Gradients of what the function captures
would be lost, or their hooks run twice, and DDP take the inner end for the end. Here the graph is the one of the plain
forward, so gradients flow, hooks run and second derivatives exist as ever; our autograd function only keeps the inputs.
Parameters are not kept at all: the second run meets them as they are then, gathered anew by ZeRO's hooks, say. It runs
the forward hooks of modules again, but stops early: those it stops in are entered and never left.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from minidist.memory.chain import Plan, in_segments, stages_of

P = ParamSpec("P")
R = TypeVar("R")


def checkpoint(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return `function(*args, **kwargs)`, and compute it again in backward.

    Parameters
    ----------
    function
        Does the same whenever it is called: the state of random numbers (of the CPU, and of the GPUs where the inputs
        are) and autocast are set as they were. It may use `checkpoint` itself.
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
    """Have `model` recompute from now on. Parameters and their names stay. Apply it after the other strategies.

    Parameters
    ----------
    model : nn.Module
        Calls the blocks in `layers` one after the other, as `x = block(x, ...)` in a loop over them.
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
    blocks = [found[index] for index in range(len(found))]
    if policy == "selective":
        _recompute_attention(blocks)
        return
    plan = _plan(policy, len(blocks), sizes) if isinstance(policy, str) else policy
    if stages_of(plan) != list(range(len(blocks))):
        raise ValueError(
            f"the plan {plan} names blocks {stages_of(plan)}, not 0 to {len(blocks) - 1} in order: plan for this model"
        )
    setattr(owner, name, Segments(blocks, plan))


class Segments(nn.ModuleList):
    """The same blocks under the same names; a loop over them gets what `plan` makes of them: blocks and segments."""

    def __init__(self, blocks: Iterable[nn.Module], plan: Plan) -> None:
        super().__init__(blocks)
        self.plan = plan

    def __iter__(self) -> Iterator[Any]:
        """Yield functions to be called in turn, each with what the one before returned."""
        return iter(self._parts(self.plan))

    def _parts(self, plan: Plan) -> list[Callable[..., Any]]:
        return [self[part] if isinstance(part, int) else partial(_segment, self._parts(part)) for part in plan]


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
    """Keeps tensors as autograd does: changes in place are noticed, and a checkpoint or spill around it has its say."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        """Save `tensors`; the result only leads to them."""
        ctx.save_for_backward(*tensors)
        return anchor.clone()


class Enough(BaseException):
    """Ends a second run: all that was asked for is there. Not an `Exception`, which a function might catch."""


class Call:
    """A function and its inputs, how the first run went, and what a second one has brought back."""

    def __init__(self, function: Callable[..., Any], leaves: list[Any], structure: TreeSpec) -> None:
        self.function, self.structure = function, structure
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensors = [leaves[place] for place in self.places]
        self.inputs: Any = Inputs.apply(torch.empty(0, requires_grad=True), *tensors).grad_fn  # type: ignore[no-untyped-call]
        gpus = {tensor.device for tensor in tensors if tensor.is_cuda}
        self.random_state = {device: _random_state(device) for device in (torch.device("cpu"), *gpus)}
        self.autocast = [_autocast_as_now(kind) for kind in {device.type for device in self.random_state}]
        self.saved: list[tuple[torch.Size, torch.dtype]] = []
        self.again: dict[int, Tensor] = {}

    def leave_out(self, tensor: Tensor) -> int:
        """Let autograd save a number."""
        self.saved.append((tensor.shape, tensor.dtype))
        return len(self.saved) - 1

    def bring_back(self, number: int) -> Tensor:
        """Give the tensor to autograd, which asks for each once; if it asks again, it keeps its graph."""
        if number not in self.again:
            self.again = dict(enumerate(self.run_again()))
        return self.again.pop(number)

    def run_again(self) -> list[Tensor]:
        """Return all that the function saves."""
        found: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            found.append(tensor.detach())
            if (tensor.shape, tensor.dtype) != self.saved[len(found) - 1]:
                raise self.other_than(f"{tensor.dtype} {list(tensor.shape)}", len(found))
            if len(found) == len(self.saved):
                raise Enough
            return found[-1]

        leaves = list(self.others)
        for place, tensor in zip(self.places, self.inputs.saved_tensors, strict=True):
            # Detached: what the function does to its inputs, such as hooking them, is not done to the graph twice.
            leaves[place] = tensor.detach().requires_grad_(tensor.requires_grad)
        args, kwargs = tree_unflatten(leaves, self.structure)
        with ExitStack() as stack:
            stack.enter_context(_random_states(self.random_state))
            for autocast in self.autocast:
                stack.enter_context(autocast)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
            try:
                self.function(*args, **kwargs)
            except Enough:
                return found
        raise self.other_than("nothing", len(found) + 1)

    def other_than(self, found: str, number: int) -> RuntimeError:
        """Say that the runs differ."""
        name = getattr(self.function, "__name__", type(self.function).__name__)
        (shape, dtype), count = self.saved[number - 1], len(self.saved)
        return RuntimeError(
            f"the checkpointed {name} saved {dtype} {list(shape)} for backward as tensor {number} of {count}, "
            f"but {found} when run again: make it do the same both times"
        )


def _segment(parts: list[Callable[..., Any]], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(_in_turn, parts, *args, **kwargs)


def _in_turn(parts: list[Callable[..., Any]], x: Any, *args: Any, **kwargs: Any) -> Any:
    for part in parts:
        x = part(x, *args, **kwargs)
    return x


def _plan(policy: str, layers: int, sizes: tuple[int, int] | None) -> Plan:
    """Turn the name of a policy into a plan."""
    every = re.fullmatch(r"every (\d+)", policy)
    if policy == "none":
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


def _recompute_attention(blocks: list[nn.Module]) -> None:
    for number, block in enumerate(blocks):
        attention: Any = getattr(block, "attention", None)
        if not callable(getattr(attention, "attend", None)):
            raise ValueError(
                f"'selective' recomputes the function attention.attend of each block, and block {number}, a "
                f"{type(block).__name__}, has none: use 'full' or 'every K'"
            )
        attention.attend = partial(checkpoint, attention.attend)


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextmanager
def _random_states(states: dict[torch.device, Tensor]) -> Iterator[None]:
    """Set the generators of some devices, and then back."""
    before = {device: _random_state(device) for device in states}
    try:
        for device, state in states.items():
            _set_random_state(device, state)
        yield
    finally:
        for device, state in before.items():
            _set_random_state(device, state)


def _autocast_as_now(kind: str) -> torch.autocast:
    return torch.autocast(
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )
