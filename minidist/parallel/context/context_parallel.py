"""Context parallelism: the tokens of each sequence are shared out among the ranks of an axis.

    everywhere else    each token by itself: a rank computes its tokens with the serial code, at their global positions
    attention          tokens see each other: `attend` is replaced

    ring         keys and values go round, beside computing        any number of ranks; the default
    all_gather   keys and values are fetched in one collective     a short sequence, or few key-value heads
    ulysses      heads are exchanged for tokens                    the fewest bytes, where there are enough heads

The model's file does not change: rotation and dropout go by `Where.positions`, and every rank's loss is a sum over its
tokens, so that gradients are summed over dp and cp together. Who calls the model cuts inputs and targets with
`shard_tokens`: labels are shifted before they are cut. (Liu et al. 2023; Jacobs et al. 2023; Llama 3, 2024.)
"""

from collections.abc import Callable
from functools import partial
from inspect import unwrap
from typing import Any

from torch import Tensor, nn

from minidist.comm import Communicator
from minidist.memory.adapters.lora import linear_in
from minidist.model.gpt import Attend, Attention
from minidist.model.moe import routed_in, sum_over
from minidist.parallel.adjoint import reduce_from
from minidist.parallel.context.blocks import Across
from minidist.parallel.context.gathered import Gathered
from minidist.parallel.context.order import check_time, positions
from minidist.parallel.context.ring import Ring
from minidist.parallel.context.ulysses import Ulysses, heads_fault

KINDS: dict[str, Callable[..., Attend]] = {"ring": Ring, "all_gather": Gathered, "ulysses": Ulysses}
WAYS = tuple(KINDS)


def parallelize_context(model: nn.Module, comm: Communicator, way: str = "ring", order: str = "zigzag") -> None:
    """Let a model's attention reach the tokens of all ranks of `comm`. Collective.

    Apply it after tensor parallelism, which leaves fewer heads, and after `recompute`: with "selective", ring and
    all_gather keep their output and lse, and Ulysses computes only what is between its exchanges again.

    Parameters
    ----------
    model : nn.Module
        One whose attention is a function: modules have an attribute `attend`, an `Attend` that is causal.
    way : {"ring", "all_gather", "ulysses"}
    order : {"zigzag", "contiguous", "striped"}
        In which the tokens lie; see `order.py`, and call the model with tokens that `shard_tokens` has cut.

    Raises
    ------
    ValueError
        As `check_context`.
    """
    check_context(model, comm.size, way, order)
    beside = (comm.stream(),) if way == "ring" else ()
    for module in attending(model):
        module.attend = KINDS[way](comm, order, module.attend, *beside)
    for layer in routed_in(model):
        sum_over(layer, partial(reduce_from, comm=comm))


def check_context(model: nn.Module, ranks: int, way: str, order: str, tp: int = 1) -> None:
    """Find out whether a model can be spread over so many ranks; tensor parallelism will yet leave 1/tp of its heads.

    Raises
    ------
    ValueError
        If there is no such way or order, no module has a function `attend`, or heads do not divide for Ulysses. Heads
        are counted before the first step if attention is `minidist.model.Attention`, otherwise in it.
    """
    check_time(order, ranks, 0)
    if way not in WAYS:
        raise ValueError(f"there is no way {way!r} of context parallelism: choose one of {', '.join(WAYS)}")
    for module in (found := attending(model)):
        if way == "ulysses" and isinstance(module, Attention):
            parts = (linear_in(part).out_features for part in (module.query, module.key))
            heads, groups = (features // module.head_dim // tp for features in parts)
            if fault := heads_fault(heads, groups, ranks):
                raise ValueError(fault)
    if not found:
        fault = f"context parallelism replaces the function `attend` of attention, and {type(model).__name__} has none"
        raise ValueError(f"{fault}: give its attention one, as minidist.model.Attention has")


def attending(model: nn.Module) -> list[Any]:
    """Return the modules whose attention is a function."""
    return [module for module in model.modules() if callable(getattr(module, "attend", None))]


def attend_alone(model: nn.Module) -> None:
    """Let attention, and what routers count, be as they were before `parallelize_context`."""
    for layer in routed_in(model):
        layer.whole = lambda mine: mine
    for module in attending(model):
        if isinstance(across := unwrap(module.attend), Across):
            module.attend = across.serial


def shard_tokens(tokens: Tensor, comm: Communicator, order: str = "zigzag") -> tuple[Tensor, Tensor]:
    """Return this rank's columns of `tokens` [B, T], and their positions [T/P] for `Where`. Nothing is sent.

    Raises
    ------
    ValueError
        If T cannot be shared out evenly.
    """
    mine = positions(order, comm.size, comm.rank, tokens.shape[1]).to(tokens.device)
    return tokens[:, mine], mine
