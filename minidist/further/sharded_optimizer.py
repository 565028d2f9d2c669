"""A sharded optimizer alone: it cuts its state, and whoever uses it reduces the gradients.

    DDP, or you                  gradients, the same on every rank
    ShardedOptimizer.step        rank r updates shard r ─▶ all-gather parameters

This is ZeRO-1 without the reduction, for a model that is wrapped in our or in torch's data
parallelism, or in none. With n bytes of parameters, each rank sends (P - 1)/P n bytes a step. DDP's
all-reduce comes on top, so both together send 1.5 times the bytes of ZeRO-1. Each rank holds 1/P of
the optimizer's state. (Rajbhandari et al. 2020, section 5.1;
`torch.distributed.optim.ZeroRedundancyOptimizer`.)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from minidist.full.comm import Communicator
from minidist.full.ddp.buckets import of_one_kind
from minidist.full.ddp.replicas import make_equal
from minidist.full.ddp.strategy import refuse_sparse
from minidist.full.optimizer.elementwise import build_over_slices
from minidist.full.optimizer.groups import chosen, read_groups
from minidist.full.optimizer.guard import GUARDS
from minidist.full.placement import copies_of
from minidist.full.zero.zero import BucketShard


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of any `kind` that holds the state of a part of the parameters on each rank.

    Parameters
    ----------
    parameters
        The first argument of torch's optimizers. The parameters are overwritten by rank 0's, and
        moved into one flat buffer for each dtype.
    kind
        As for the method `optimizer` of a model that ZeRO shards, such as torch's AdamW.
    comm : Communicator
        The ranks.
    elementwise : bool
        Say that a `kind` treats each element separately, if it is not one of torch's or of this
        package.
    **options
        Arguments of `kind`.

    Before `step` each parameter must have the same gradient on every rank, or none on any rank.
    Afterwards all ranks have the same new parameters. (With experts that ranks have shared out,
    this holds among the copies of each.) Building it, `step` and `state_dict` are collective. The
    state is that of an unsharded optimizer, and can be loaded on any number of ranks.

    Raises
    ------
    MismatchError
        On every rank, if the ranks' parameters differ in shape or dtype.
    ValueError
        If `kind` is not known to work on slices, if another strategy has sharded the parameters, or
        if tensor parallelism has given ranks of `comm` different blocks of one.
    RuntimeError
        In `step`, if something has moved or converted the parameters since: `.to()`, or a strategy.
    """

    def __init__(
        self,
        parameters: ParamsT,
        kind: Callable[..., torch.optim.Optimizer],
        comm: Communicator,
        elementwise: bool = False,
        **options: Any,
    ) -> None:
        self.elementwise = True  # what its step updates; whether `kind` fits slices is checked here
        groups = read_groups(parameters)
        names: dict[nn.Parameter, str] = {}
        for group in groups:
            given = group.get("param_names") or [
                f"parameter {len(names) + at}" for at in range(len(group["params"]))
            ]
            names |= zip(group["params"], given, strict=True)
        GUARDS.check(self, set(map(id, names)))
        self.comm, self.parameters = comm, nn.ParameterList(names)
        make_equal(self.parameters, comm)
        kinds = of_one_kind(self.parameters)
        self.shards = [BucketShard(alike, names, copies_of(alike[0], comm)) for alike in kinds]
        self.slices = {
            parameter: piece
            for part in self.shards
            for parameter, piece in part.shard.slices.items()
        }
        local = build_over_slices(
            kind, [chosen(group, self.slices) for group in groups], elementwise, options
        )
        # over whole parameters: whoever scales or clips looks for them here
        super().__init__(groups, local.defaults)
        self.local, self.state = local, local.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Update this rank's part, and gather the rest.

        Return the result of `closure`, called first. Collective.

        Further arguments are those of the `step` of `kind`.
        """
        with torch.enable_grad():
            loss = closure() if closure else None
        copy_options(self.param_groups, self.local.param_groups)
        for part in self.shards:
            part.check_place()
        # Now each slice gets its piece of the gradient, and the step updates this rank's part.
        for part in self.shards:
            for parameter, piece in part.shard.slices.items():
                piece.grad = None
                if parameter.grad is not None:
                    placement = part.shard.placements[parameter]
                    refuse_sparse(parameter, placement.name, "ShardedOptimizer")
                    piece.grad = placement.take(parameter.grad)
        self.local.step(**options)
        # Now every rank has a new part, so all are gathered.
        for part in self.shards:
            part.publish()
        for piece in self.slices.values():
            piece.grad = None  # a view, which would keep all of it
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the parameters, or make them zeros."""
        self.parameters.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of an unsharded optimizer. Collective."""
        copy_options(self.param_groups, self.local.param_groups)
        return self.local.state_dict()  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an unsharded optimizer, or of a sharded one on any number of ranks."""
        self.local.load_state_dict(state_dict)
        copy_options(self.local.param_groups, self.param_groups)
        self.state = self.local.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the parameters are shared out when the optimizer is built."""
        if "local" in vars(self):
            raise TypeError(
                "a ShardedOptimizer shares its parameters out when it is built: give them all to "
                "it then"
            )
        super().add_param_group(param_group)


def copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Give each group of `target` the options of its twin, such as a learning rate that a schedule
    has changed.
    """
    for theirs, ours in zip(source, target, strict=True):
        ours.update(
            {name: value for name, value in theirs.items() if name not in ("params", "param_names")}
        )
