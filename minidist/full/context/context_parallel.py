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
`SlidingWindow` as such; `probe.py` finds out in the first call whether that is the same. Ulysses calls the model's
own. A GPT is asked for the positions of its tokens (`KnownPositions`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from minidist.full.adapters.lora import linear_in
from minidist.full.adjoint import reduce_from
from minidist.full.comm import Communicator, MismatchError
from minidist.full.context.blocks import Across
from minidist.full.context.gathered import Gathered
from minidist.full.context.options import WAYS
from minidist.full.context.order import check_time, multiple, positions
from minidist.full.context.probe import Probe
from minidist.full.context.ring import Ring
from minidist.full.context.ulysses import Ulysses, heads_fault
from minidist.full.mesh import Layout, Mesh
from minidist.full.model.attention import SlidingWindow
from minidist.full.model.dropout import ORIGIN, Where
from minidist.full.model.gpt import GPT, Attend, Attention
from minidist.full.model.moe.routed import alone, routed_in, sum_over
from minidist.full.recipe import Recipe, RecipeError
from minidist.full.recompute.segments import checkpoint
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
        As `check_context`.
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
    for name, module in attending(model).items():
        own = without_checkpoint(module.attend)
        window = window_of(own)
        probe = None if way == "ulysses" or window else Probe(module, called(name), own, way)
        module.attend = KINDS[way](comm, order, module.attend, *beside, probe=probe, window=window)
    for layer in routed_in(model):
        sum_over(layer, partial(reduce_from, comm=comm))
    for module in model.modules():
        if isinstance(module, GPT) and comm.size > 1:
            KnownPositions(module, order, comm)


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
    found = attending(model)
    for name, module in found.items():
        if across(module.attend) is not None:
            raise ValueError(
                f"{called(name)} reaches the tokens of other ranks already, and would exchange "
                "them twice: call parallelize_context once"
            )
        # Attention that does not say how many heads it has is asked in its first call.
        if way == "ulysses" and isinstance(module, Attention):
            heads, groups = (
                max(1, linear_in(part).out_features // module.head_dim // tp)
                for part in (module.query, module.key)
            )
            if fault := heads_fault(heads, groups, ranks):
                raise ValueError(fault)
    if not found:
        fault = (
            "context parallelism replaces the function `attend` of attention, and "
            f"{type(model).__name__} has none"
        )
        raise ValueError(f"{fault}: give its attention one, as minidist.full.model.Attention has")


def called(name: str) -> str:
    """Return how the attention of a module of this name is called in errors."""
    return f"{name}.attend".lstrip(".")


def without_checkpoint(attend: Any) -> Any:
    """Return an `attend` as it was before `recompute` had it computed again."""
    while isinstance(attend, partial) and attend.func is checkpoint:
        attend = attend.args[0]
    return attend


def window_of(attend: Any) -> int:
    """Return how many tokens the model's own attention sees; 0: all, or it is another one."""
    found = unwrap(without_checkpoint(attend))
    return found.window if isinstance(found, SlidingWindow) else 0


class KnownPositions:
    """A hook on a GPT: its tokens have to say where they are, or they would be rotated, and
    dropped, as if elsewhere.

    A number in place of positions is refused on all ranks, though it may be right on one of them.
    On a GPU, positions of one length are compared in the first call only: to compare them is to
    wait for the GPU.
    """

    def __init__(self, model: GPT, order: str, comm: Communicator) -> None:
        self.order, self.comm = order, comm
        self.seen: set[int] = set()
        self.handle = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise ValueError unless `where.positions` are those of this rank's tokens."""
        where: Where = kwargs.get("where", args[1] if len(args) > 1 else ORIGIN)
        given, ranks = where.positions, self.comm.size
        wanted = "others on each rank"
        if isinstance(given, Tensor):
            if given.is_meta or (given.is_cuda and len(given) in self.seen):
                return
            mine = positions(self.order, ranks, self.comm.rank, ranks * len(given))
            if torch.equal(given.cpu(), mine):
                self.seen.add(len(given))
                return
            wanted = f"{mine} on rank {self.comm.rank}"
        raise ValueError(
            f"the GPT was called with positions {given}, but in {self.order} order these are "
            f"{wanted}: pass Where(positions=...) that shard_tokens returns"
        )


def attending(model: nn.Module) -> dict[str, Any]:
    """Return the modules whose attention is a function, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if callable(getattr(module, "attend", None))
    }


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
    for module in attending(model).values():
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
