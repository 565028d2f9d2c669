"""Units of ZeRO-3: parameters that are gathered together.

    sharded         shard 0 │ shard 1 │ shard 2        each rank has its own; parameters are freed
    unsharded       ───────── unsharded ─────────      on every rank; the parameters are views into it

A `Unit` has a `Flat` for each kind of parameters. The states and verbs are torch's.
"""

from collections.abc import Iterator
from enum import Enum, auto
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from minidist.full.comm.stream import Handle
from minidist.full.ddp.flatten import make_room
from minidist.full.fsdp.flat import Flat
from minidist.full.fsdp.policy import MixedPrecision
from minidist.full.fsdp.ranks import Ranks, SameSteps


class ShardedState(Enum):
    """Whether the parameters of a unit are there."""

    SHARDED = auto()
    UNSHARDING = auto()  # they are being gathered, and nobody has waited for it yet
    UNSHARDED = auto()


class TrainingState(Enum):
    """Which code of a unit runs now. In backward none does, but what autograd has saved of it."""

    IDLE = auto()
    FORWARD = auto()
    METHOD = auto()  # another method, as if it were its forward


class Unit:
    """The book's `Unit`, gathered while others compute: `unshard` begins, then `wait_for_unshard`, use,
    `reshard`.

    Attributes
    ----------
    name : str
        The module's name; empty for the root.
    flats : list[Flat]
        The flats of its parameters. `trained` are those of trained parameters, `cut` those that are
        not replicated.
    parameters : set[nn.Parameter]
        The trained ones.
    arrived : set[nn.Parameter]
        Those whose gradients came in this backward.
    began : int
        The number of the first of autograd's nodes that could be made by the last forward.
    """

    def __init__(
        self, name: str, module: nn.Module, flats: list[Flat], precision: MixedPrecision
    ) -> None:
        self.name, self.module = name, module
        self.flats, self.precision = flats, precision
        self.trained = [flat for flat in flats if flat.trained]
        self.cut = [flat for flat in flats if not flat.replicated]
        self.parameters = {parameter for flat in self.trained for parameter in flat.parameters}
        self.sharded_state = ShardedState.SHARDED
        self.training_state = TrainingState.IDLE
        self.gathering: Handle | None = None
        self.arrived: set[nn.Parameter] = set()
        self.began = 0

    def unshard(self, ranks: Ranks) -> None:
        """Begin to gather the parameters."""
        assert self.sharded_state is ShardedState.SHARDED, "a unit is gathered once"
        rooms = [make_room(flat.unsharded) for flat in self.cut]
        self.gathering = ranks.stream.launch(self._gather, ranks.same, rooms)
        self.sharded_state = ShardedState.UNSHARDING

    def _gather(self, same: SameSteps, rooms: list[Tensor]) -> None:
        """Gather the parameters. Runs on the stream."""
        same.step(f"gather {self.name or 'the root unit'}")
        for flat, room in zip(self.cut, rooms, strict=True):
            flat.transport.gather(flat, room)

    def wait_for_unshard(self) -> None:
        """Wait until the parameters are there."""
        if self.gathering is not None:
            self.gathering.wait()
            self.sharded_state, self.gathering = ShardedState.UNSHARDED, None
            for flat in self.flats:
                flat.check_place()
            for flat in self.cut:
                flat.show()

    def reshard(self) -> None:
        """Free all parameters but the shards."""
        self.wait_for_unshard()
        if self.sharded_state is ShardedState.UNSHARDED:
            for flat in self.cut:
                flat.release()
            self.sharded_state = ShardedState.SHARDED

    @property
    def all_arrived(self) -> bool:
        """Whether all gradients have come in this backward."""
        return len(self.arrived) == len(self.parameters)

    def made(self, output: Any) -> list[Tensor]:
        """Return the tensors of the last forward that can be seen: in the nested `output`, and as
        attributes of the unit's modules. And the bases of views: their hooks stay when a view is
        changed in place.
        """
        seen = [*tensors_in(output)]
        for module in self.module.modules() if self.name else ():
            seen += [value for value in vars(module).values() if type(value) is Tensor]
        seen += [tensor._base for tensor in seen if tensor._base is not None]
        return [tensor for tensor in seen if number_of(tensor.grad_fn) >= self.began]

    def apart(self, output: Any) -> Any:
        """Return the nested `output`, with copies of tensors that lie in the unit's memory, which
        may be freed now.
        """
        ours = [flat.unsharded.data_ptr() for flat in self.flats if flat.unsharded.data_ptr()]
        return tree_map_only(
            Tensor, lambda t: t.clone() if t.untyped_storage().data_ptr() in ours else t, output
        )


def tensors_in(nested: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested values, also those that objects in there have as attributes."""
    for leaf in tree_leaves(nested):
        within = [leaf] if isinstance(leaf, Tensor) else tree_leaves(getattr(leaf, "__dict__", ()))
        yield from (each for each in within if isinstance(each, Tensor))


def number_of(node: Any) -> int:
    """Return which of its thread's nodes this one of autograd is, or -1 for None."""
    return -1 if node is None else node._sequence_nr()
