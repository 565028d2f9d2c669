"""Context parallelism: the tokens of each sequence are shared out among the ranks of an axis.

    everywhere else    each token by itself: a rank computes its tokens with the serial code, at their global positions
    attention          tokens see each other: `attend` is replaced

    ring         keys and values go round, beside computing        any number of ranks; the default
    all_gather   keys and values are fetched in one collective     a short sequence, or few key-value heads
    ulysses      heads are exchanged for tokens                    the fewest bytes, where there are enough heads

The model's file does not change: rotation and dropout go by `Where.positions`, and every rank's
loss is a sum over its tokens, so that gradients are summed over dp and cp together. Who calls the
model cuts inputs and targets with `shard_tokens`: labels are shifted before they are cut. (Liu et
al. 2023; Jacobs et al. 2023; Llama 3, 2024.)

With a window, or documents that are packed into a row, ring and all_gather send only the keys that
are seen (`in_sight.py`); Ulysses sends all, as some query sees each.

Ring and all_gather compute causal attention at 1/√d in place of the model's own `attend`, and a
`SlidingWindow` as such; `probe.py` finds out whether that is the same. Ulysses calls the model's
own. A GPT is asked for the positions of its tokens (`KnownPositions`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from minidist.full.adapters.lora import linear_in
from minidist.full.adjoint import reduce_from
from minidist.full.comm import Communicator, MismatchError
from minidist.full.context.blocks import Across
from minidist.full.context.gathered import Gathered
from minidist.full.context.options import WAYS
from minidist.full.context.order import check_time, multiple, positions
from minidist.full.context.probe import (
    Heads,
    Probe,
    attend_fault,
    guessed_fault,
    not_plain,
    without_checkpoint,
)
from minidist.full.context.ring import Ring
from minidist.full.context.ulysses import Ulysses, heads_fault
from minidist.full.mesh import Layout, Mesh
from minidist.full.model.attention import SlidingWindow
from minidist.full.model.dropout import ORIGIN, Where
from minidist.full.model.gpt import GPT, Attend, Attention
from minidist.full.model.moe.routed import alone, routed_in, sum_over
from minidist.full.recipe import Recipe, RecipeError
from minidist.full.strategy import Facts, Parallel, Strategy

KINDS: dict[str, Callable[..., Attend]] = {"ring": Ring, "all_gather": Gathered, "ulysses": Ulysses}


class ContextParallelism(Strategy):
    """Lets attention reach the tokens of other ranks."""

    def wanted(self, recipe: Recipe, layout: Layout, facts: Facts) -> bool:
        """The context axis has several ranks."""
        return layout.cp > 1

    def check(self, model: nn.Module, mesh: Mesh, recipe: Recipe) -> None:
        """Ask the model's attention. Tensor parallelism will have left fewer heads."""
        layout = mesh.layout
        try:
            check_context(model, layout.cp, recipe.cp_comm, recipe.cp_order, layout.tp)
        except ValueError as error:
            raise RecipeError(f"cp={layout.cp}: {error}") from None

    def apply(self, parallel: Parallel, checked: Any) -> None:
        """Replace the attention of each stage."""
        recipe = parallel.recipe
        for stage in parallel.stages.values():
            attend_across(stage, parallel.mesh.cp, recipe.cp_comm, recipe.cp_order)

    def shares(self, recipe: Recipe, layout: Layout) -> dict[str, int]:
        """Tokens of a sequence are dealt out in the order that the recipe names."""
        return {"cp": multiple(recipe.cp_order, layout.cp)}

    def words(self, recipe: Recipe, mesh: Mesh) -> str:
        """Name the way, and the order of tokens."""
        return f"cp={mesh.cp.size} ({recipe.cp_comm}, {recipe.cp_order} order)"

    def undo(self, parallel: Parallel) -> None:
        """Attend to this rank's own tokens."""
        attend_alone(parallel.model)


def parallelize_context(
    model: nn.Module, comm: Communicator, way: str = "ring", order: str = "zigzag"
) -> None:
    """Let a model's attention reach the tokens of all ranks of `comm`. Collective.

    Apply it after tensor parallelism, which leaves fewer heads, and after `recompute`: with
    "selective", ring and all_gather keep their output and lse, and Ulysses computes only what is
    between its exchanges again.

    Parameters
    ----------
    model : nn.Module
        One whose attention is a function: modules have an attribute `attend`, an `Attend` that is
        causal.
    way : {"ring", "all_gather", "ulysses"}
    order : {"zigzag", "contiguous", "striped"}
        The order in which the tokens lie; see `order.py`, and call the model with tokens that `shard_tokens`
        has cut.

    Raises
    ------
    ValueError
        As `check_context`. Attention that does not say how many heads it has is asked again in its
        first call.
    MismatchError
        On every rank, if the ranks give different ways or orders.
    """
    check_context(model, comm.size, way, order)
    wanted = comm.all_gather_object((way, order))
    for rank, (other, its) in enumerate(wanted):
        if (other, its) != wanted[0]:
            fault = (
                f"rank 0 has {wanted[0][0]!r} in order {wanted[0][1]!r}, and rank {rank} "
                f"{other!r} in {its!r}"
            )
            reason = "they would take each other's tokens for others"
            raise MismatchError(f"{fault}: {reason}, so give all ranks the same way and order")
    attend_across(model, comm, way, order)


def attend_across(model: nn.Module, comm: Communicator, way: str, order: str) -> None:
    """Replace a model's attention, which `check_context` has looked at. Sends nothing."""
    beside = (comm.stream(),) if way == "ring" else ()
    for module in attending(model):
        window = window_of(module.attend)
        probe = None if way == "ulysses" or window else Probe(module, module.attend, way)
        module.attend = KINDS[way](comm, order, module.attend, *beside, probe=probe, window=window)
    for layer in routed_in(model):
        sum_over(layer, partial(reduce_from, comm=comm))
    for module in model.modules():
        if isinstance(module, GPT) and comm.size > 1:
            KnownPositions(order, comm.size, comm.rank).watch(module)


def check_context(model: nn.Module, ranks: int, way: str, order: str, tp: int = 1) -> None:
    """Find out whether a model can be spread over so many ranks.

    Tensor parallelism will yet leave 1/tp of its heads.

    Raises
    ------
    ValueError
        If there is no such way or order, no module has a function `attend`, or it reaches other
        ranks already; for ring and all_gather, if it is not causal attention at 1/√d; for Ulysses,
        if heads do not divide. Heads are counted before the first step if attention is
        `minidist.full.model.Attention`, otherwise in it.
    """
    check_time(order, ranks, 0)
    if way not in WAYS:
        raise ValueError(
            f"there is no way {way!r} of context parallelism: choose one of {', '.join(WAYS)}"
        )
    found = {name: module for name, module in model.named_modules() if has_attend(module)}
    for name, module in found.items():
        called = f"{name}.attend".lstrip(".")
        if across(module.attend) is not None:
            fault = (
                f"{called} reaches the tokens of other ranks already, and would exchange them twice"
            )
            raise ValueError(f"{fault}: call parallelize_context once")
        heads = heads_of(module, tp)
        if way != "ulysses":
            own = without_checkpoint(module.attend)
            if window_of(own):
                continue
            fault = attend_fault(module, own, heads) if heads else guessed_fault(module, own)
            if fault:
                raise ValueError(not_plain(called, fault, way))
        elif heads and (fault := heads_fault(heads.queries, heads.groups, ranks)):
            raise ValueError(fault)
    if not found:
        fault = (
            "context parallelism replaces the function `attend` of attention, and "
            f"{type(model).__name__} has none"
        )
        raise ValueError(f"{fault}: give its attention one, as minidist.full.model.Attention has")


def window_of(attend: Any) -> int:
    """Return how many tokens the model's own attention sees; 0: all, or it is another one."""
    found = unwrap(without_checkpoint(attend))
    return found.window if isinstance(found, SlidingWindow) else 0


def heads_of(module: nn.Module, tp: int) -> Heads | None:
    """Return what `attend` of the model's own attention will be called with, on each of `tp` ranks;
    else None.
    """
    if not isinstance(module, Attention):
        return None
    parts: Any = (linear_in(part).out_features for part in (module.query, module.key))
    heads, groups = (features // module.head_dim for features in parts)
    return Heads(max(1, heads // tp), max(1, groups // tp), module.head_dim)


class KnownPositions:
    """A hook on a GPT: its tokens have to say where they are, or they would be rotated, and
    dropped, as if elsewhere.

    A number in place of positions is refused on all ranks, though it may be right on one of them.
    On a GPU, positions of one length are compared in the first call only: to compare them is to
    wait for the GPU.
    """

    handle: RemovableHandle

    def __init__(self, order: str, ranks: int, rank: int) -> None:
        self.order, self.ranks, self.rank = order, ranks, rank
        self.seen: set[int] = set()

    def watch(self, model: GPT) -> None:
        """Ask in each call of this model."""
        self.handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise ValueError unless `where.positions` are those of this rank's tokens."""
        where: Where = kwargs.get("where", args[1] if len(args) > 1 else ORIGIN)
        given = where.positions
        if not isinstance(given, Tensor):
            fault = (
                f"the GPT was called with positions from {given} on, and these {self.ranks} ranks "
                "have tokens apart"
            )
            raise ValueError(f"{fault}: pass Where(positions=...) that shard_tokens returns")
        time = len(given)
        if given.is_meta or (given.is_cuda and time in self.seen):
            return
        mine = positions(self.order, self.ranks, self.rank, self.ranks * time)
        if not torch.equal(given.cpu(), mine):
            told = f"the GPT was called with positions {words(given)} on rank {self.rank}"
            wanted = f"but in {self.order} order these are {words(mine)}"
            raise ValueError(
                f"{told}, {wanted}: pass Where(positions=...) that shard_tokens returns"
            )
        self.seen.add(time)


def words(given: Tensor) -> str:
    """Return positions in a few words."""
    shown = ", ".join(str(number) for number in given[:4].tolist())
    return f"{shown}, ..." if len(given) > 4 else shown


def has_attend(module: nn.Module) -> bool:
    """Tell whether a module's attention is a function."""
    return callable(getattr(module, "attend", None))


def attending(model: nn.Module) -> list[Any]:
    """Return the modules whose attention is a function."""
    return [module for module in model.modules() if has_attend(module)]


def across(attend: Any) -> Across | None:
    """Return what lets an `attend` reach other ranks, whether or not it is computed again or
    compiled; else None.
    """
    found = unwrap(without_checkpoint(attend))
    return found if isinstance(found, Across) else None


def attend_alone(model: nn.Module) -> None:
    """Let attention, and what routers count, be as they were before `parallelize_context`."""
    for layer in routed_in(model):
        layer.sum_over_sequence = alone
    for module in attending(model):
        if (found := across(module.attend)) is not None:
            module.attend = found.serial
    for module in model.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, KnownPositions):
                hook.handle.remove()


def shard_tokens(
    tokens: Tensor, comm: Communicator, order: str = "zigzag"
) -> tuple[Tensor, Tensor]:
    """Return this rank's columns of `tokens` [B, T], and their positions [T/P] for `Where`.

    Nothing is sent.

    Raises
    ------
    ValueError
        If T cannot be shared out evenly.
    """
    mine = positions(order, comm.size, comm.rank, tokens.shape[1]).to(tokens.device)
    return tokens[:, mine], mine


def columns_of(recipe: Recipe, mesh: Mesh) -> Callable[[int], Tensor] | None:
    """Return a function from the tokens of a row to the positions of those that this rank has;
    None: it has all.
    """
    if mesh.cp.size == 1:
        return None
    return partial(positions, recipe.cp_order, mesh.cp.size, mesh.cp.rank)
