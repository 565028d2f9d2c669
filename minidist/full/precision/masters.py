"""Master weights: the optimizer updates float32 copies of 16-bit parameters, and rounds them back.

    state      step │ mean │ mean square │ master, float32
                                              │ - lr * ...      keeps an update of 0.003 to a weight of 1
    parameter                                 └─▶ rounded       bfloat16 changes once they sum to over 1/256

`mixed.py` shows where masters stand in a training step. (Micikevicius et al. 2018, section 3.1.)
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT

MIB = 1 << 20
State: TypeAlias = dict[str, Any]
"""The state of one parameter: the optimizer's tensors and numbers by name, and `master`."""
Chunk: TypeAlias = tuple[dict[str, Any], list[nn.Parameter]]
"""A parameter group, and those of its parameters that are updated together."""


@dataclass
class Visit:
    """A chunk of parameters, and the masters and states that the optimizer receives in their
    place.
    """

    group: dict[str, Any]
    parameters: list[nn.Parameter]
    masters: list[nn.Parameter]
    states: list[State]


class MasterWeights(Optimizer):
    """An optimizer around another one, which updates float32 masters in place of 16-bit parameters.

    Parameters
    ----------
    params : iterable of parameters, or of groups
        Parameters of 32 or 64 bits are their own masters.
    optimizer : type
        `torch.optim.AdamW` or any other class that updates each parameter separately.
    chunk_bytes : int
        A chunk is full once its parameters hold this many bytes. Only one chunk at a time has
        float32 gradients.
    **options
        The inner optimizer's options.

    The first step copies each master from its parameter, after the strategies have changed the
    model. Overwriting a parameter in place later, as a checkpoint does, overwrites its master too.
    State: the inner optimizer's, and 4 bytes for each element of a 16-bit parameter. A step with
    float16 gradients:

        norm = clip_by_global_norm(parameters, 0)            # measures the scaled gradients and changes nothing
        overflow = scaler.overflowed(norm)
        if not overflow:
            optimizer.step(factor=min(1.0, limit / float(norm / scaler.scale)) / scaler.scale)
        scaler.update(overflow)
    """

    # a shard of a parameter can be updated alone, if the inner optimizer can do so
    elementwise = True
    place: torch.device | None = None  # of masters and state; None: the device of their parameter

    def __init__(
        self,
        params: ParamsT,
        optimizer: Callable[..., Optimizer] = AdamW,
        chunk_bytes: int = 16 * MIB,
        **options: Any,
    ) -> None:
        self.optimizer, self.options = optimizer, options
        self.chunk_bytes, self.factor = chunk_bytes, 1.0
        # of each parameter, when it last was its master's rounded copy
        self.versions: dict[Tensor, int] = {}
        example = optimizer([nn.Parameter(torch.zeros(1, 1))], **options)
        self.inner = type(example)
        super().__init__(params, example.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, factor: float = 1.0) -> Any:
        """Update every parameter that has a gradient; return what `closure`, called first,
        returned.

        `factor` multiplies the gradients after they were widened. Parameters that are their own
        masters have their gradients multiplied in place.
        """
        with torch.enable_grad():
            loss = closure() if closure else None
        self.factor = factor
        self._update(list(self._chunks()))
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of this class, or of the inner optimizer: masters are then copied
        from parameters.
        """
        loaded: dict[nn.Parameter, State] = {}

        def take(_: object, saved: dict[str, Any]) -> dict[str, Any]:
            """Leave the groups to torch, which checks them, but not the state, which it would cast
            to 16 bits.
            """
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            mine = [parameter for group in self.param_groups for parameter in group["params"]]
            loaded.update(
                {
                    p: saved["state"][n]
                    for n, p in zip(numbers, mine, strict=False)
                    if n in saved["state"]
                }
            )
            self._make_room(loaded)
            return saved | {"state": {}}

        # runs last, after sharding has cut the state
        hook = self.register_load_state_dict_pre_hook(take)
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        self._take_over(loaded)

    def restore(self, states: dict[nn.Parameter, State]) -> None:
        """Continue with states that `state_of` returned. Load the parameters first.

        Raises
        ------
        OSError
            If there is no room for them. The optimizer is then unchanged.
        """
        self._make_room(states)
        self._take_over(states)

    def _take_over(self, states: dict[nn.Parameter, State]) -> None:
        self.versions.clear()
        for parameter, state in states.items():
            kept = {name: self._copied(value, parameter) for name, value in state.items()}
            if self._is_own_master(parameter):
                kept.pop("master", None)
            self._store(parameter, kept)

    def _chunks(self) -> Iterator[Chunk]:
        for group in self.param_groups:
            chunk: list[nn.Parameter] = []
            for parameter in (
                parameter for parameter in group["params"] if parameter.grad is not None
            ):
                same = not chunk or (chunk[0].dtype, chunk[0].device) == (
                    parameter.dtype,
                    parameter.device,
                )
                if not same or sum(other.nbytes for other in chunk) >= self.chunk_bytes:
                    yield group, chunk
                    chunk = []
                chunk.append(parameter)
            if chunk:
                yield group, chunk

    def _update(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            visit = self._fetch(*chunk)
            self._advance(visit)
            self._keep(visit)

    def _fetch(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> Visit:
        """Collect the masters, gradients and states of a chunk."""
        states = [self.state_of(parameter) for parameter in parameters]
        masters = [
            self._master(p, state.pop("master", None))
            for p, state in zip(parameters, states, strict=True)
        ]
        return Visit(group, parameters, masters, states)

    def _advance(self, visit: Visit) -> None:
        """Run the inner optimizer's step on a chunk."""
        options = {
            name: value
            for name, value in visit.group.items()
            if name not in ("params", "param_names")
        }
        optimizer = self.optimizer([{**options, "params": visit.masters}], **self.options)
        pairs = zip(visit.masters, visit.states, strict=True)
        optimizer.state.update({master: state for master, state in pairs if state})
        optimizer.step()
        visit.states = [dict(optimizer.state[master]) for master in visit.masters]

    def _keep(self, visit: Visit) -> None:
        """Round the masters of a chunk to their parameters, and store its states."""
        for parameter, master, state in zip(
            visit.parameters, visit.masters, visit.states, strict=True
        ):
            if not self._is_own_master(parameter):
                parameter.copy_(master)
                self.versions[parameter] = parameter._version
                state["master"] = master.detach()
            self._store(parameter, state)

    def _master(self, parameter: nn.Parameter, master: Tensor | None) -> nn.Parameter:
        """Return the master, with its gradient: a view of the parameter's own memory if that is
        wide enough.
        """
        assert parameter.grad is not None
        if self._is_own_master(parameter):
            if self.factor != 1:
                parameter.grad.mul_(self.factor)
            # shares memory; a shard may be known to its own optimizer alone
            twin = nn.Parameter(parameter.detach())
            twin.grad = parameter.grad
            return twin
        twin = nn.Parameter(self._current(parameter, master))
        twin.grad = self._widened(parameter.grad).mul_(self.factor)
        return twin

    def _current(self, parameter: Tensor, master: Tensor | None) -> Tensor:
        """Return a master, or a new one if the parameter was overwritten since."""
        # by someone else, perhaps with the same value
        written = self.versions.get(parameter) != parameter._version
        if master is None or (written and not torch.equal(parameter, master.to(parameter))):
            return self._widened(parameter.detach())
        return master

    def master_of(self, parameter: Tensor) -> Tensor:
        """Return the values that the next step will update: a parameter's own, or its master's."""
        if self._is_own_master(parameter):
            return parameter.detach()
        return self._current(parameter, self.state_of(parameter).get("master"))

    @torch.no_grad()
    def overwrite(self, parameter: Tensor, values: Tensor) -> None:
        """Let a parameter have other values, and its master the same, not rounded."""
        parameter.copy_(values)
        if not self._is_own_master(parameter):
            self.versions[parameter] = parameter._version
            master = values.to(self.place or parameter.device, wide(parameter), copy=True)
            self._store(parameter, self.state_of(parameter) | {"master": master})

    # What follows decides where masters and state live. `OffloadedOptimizer` moves them.

    def _is_own_master(self, parameter: Tensor) -> bool:
        return parameter.dtype == wide(parameter) and self.place in (None, parameter.device)

    def _widened(self, tensor: Tensor) -> Tensor:
        """Return a copy to serve as a master or its gradient."""
        return tensor.to(self.place or tensor.device, wide(tensor), copy=True)

    def _copied(self, value: object, parameter: Tensor) -> object:
        """Copy a loaded state value to its place, and widen it unless it is a scalar or holds
        integers.
        """
        if not isinstance(value, Tensor):
            return value
        if not value.dim():
            return value.clone()
        dtype = wide(parameter) if value.is_floating_point() else None
        return value.to(self.place or parameter.device, dtype, copy=True)

    def _make_room(self, parameters: Iterable[Tensor]) -> None:
        """Claim room for the states of parameters, or raise before anything is changed."""

    def state_of(self, parameter: Tensor) -> State:
        """Return the state of a parameter: tensors of its shape, such as moments, and numbers."""
        return dict(self.state.get(parameter, {}))

    def _store(self, parameter: Tensor, state: State) -> None:
        if state:
            self.state[parameter] = state


def wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a tensor's master: float32, or the tensor's own if that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)
