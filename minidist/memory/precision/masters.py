"""Master weights: the optimizer updates float32 copies of 16-bit parameters, and rounds them back.

    state      step │ mean │ mean square │ master, float32
                                              │ - lr * ...      an update of 0.003 to a weight of 1 is kept
    parameter                                 └─▶ rounded       bfloat16 moves when 1/128 has come together

(Micikevicius et al. 2018, section 3.1.) `precision` shows where this belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from minidist.memory.precision.rounding import stochastic_round

MIB = 1 << 20
State: TypeAlias = dict[str, Any]
"""What is kept of one parameter: the optimizer's tensors and numbers by their names, and `master`."""
Chunk: TypeAlias = tuple[dict[str, Any], list[nn.Parameter]]
"""Parameters of one group, and the group."""


@dataclass
class Visit:
    """A chunk of parameters of one group, and what the optimizer is given in their place."""

    group: dict[str, Any]
    parameters: list[nn.Parameter]
    masters: list[nn.Parameter]
    states: list[State]


class MasterWeights(torch.optim.Optimizer):
    """Any optimizer that treats each parameter for itself; those of 16 bits are updated as float32 masters.

    Parameters
    ----------
    params : iterable of parameters, or of groups
        Wider ones are their own masters.
    optimizer : type
        `torch.optim.AdamW` or any other class.
    rounding : torch.Generator, optional
        Round bfloat16 parameters stochastically. Seed it alike on ranks that hold the same parameters.
    chunk_bytes : int
        Parameters are updated in chunks that are closed once they hold so many bytes: only those of one chunk have
        gradients in float32.
    **options
        The optimizer's own.

    A master is read off its parameter at the first step, so what a strategy does to the model before counts. Who
    overwrites a parameter in place later, say from a checkpoint, overwrites its master too. For float16:

        norm = clip_by_global_norm(parameters, 0)            # measures the scaled gradients, changes nothing
        overflow = scaler.overflowed(norm)
        if not overflow:
            optimizer.step(factor=min(1.0, limit / float(norm / scaler.scale)) / scaler.scale)
        scaler.update(overflow)
    """

    elementwise = True  # slices will do, if they will for the optimizer inside

    def __init__(
        self,
        params: ParamsT,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        rounding: torch.Generator | None = None,
        chunk_bytes: int = 16 * MIB,
        **options: Any,
    ) -> None:
        self.optimizer, self.options, self.rounding = optimizer, options, rounding
        self.chunk_bytes, self.factor = chunk_bytes, 1.0
        self.versions: dict[Tensor, int] = {}  # of parameters with a master, when they last were its rounded copies
        example = optimizer([nn.Parameter(torch.zeros(1, 1))], **options)
        self.inner = type(example)
        super().__init__(params, example.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, factor: float = 1.0) -> Any:
        """Update every parameter that has a gradient; return what `closure`, called first, returned.

        Gradients are multiplied by `factor` after they were widened; those of parameters that are their own masters,
        in place.
        """
        with torch.enable_grad():
            loss = closure() if closure else None
        self.factor = factor
        self._update(list(self._chunks()))
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return torch's own form; a parameter's master stands beside its moments, under the name `master`."""
        saved = super().state_dict()
        return saved if self.rounding is None else saved | {"rounding": self.rounding.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, also from that of the optimizer alone: the parameters then become the masters."""
        loaded: dict[nn.Parameter, State] = {}

        def take(_: object, saved: dict[str, Any]) -> dict[str, Any]:
            """Leave the groups to torch, which checks them; the state it would cast to 16 bits."""
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            mine = [parameter for group in self.param_groups for parameter in group["params"]]
            loaded.update({p: saved["state"][n] for n, p in zip(numbers, mine, strict=False) if n in saved["state"]})
            self._expect(loaded)
            return saved | {"state": {}}

        hook = self.register_load_state_dict_pre_hook(take)  # the last one: sharding has cut the state by then
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        self._take_over(loaded)
        if self.rounding is not None and "rounding" in state_dict:
            self.rounding.set_state(state_dict["rounding"])

    def restore(self, states: dict[nn.Parameter, State]) -> None:
        """Continue with these states of parameters, as `state_of` returned them; the parameters are loaded before.

        Raises
        ------
        OSError
            If there is no room for them. Nothing has been changed then.
        """
        self._expect(states)
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
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                same = not chunk or (chunk[0].dtype, chunk[0].device) == (parameter.dtype, parameter.device)
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
        """Collect what the optimizer needs for a chunk."""
        states = [self.state_of(parameter) for parameter in parameters]
        masters = [self._master(p, state.pop("master", None)) for p, state in zip(parameters, states, strict=True)]
        return Visit(group, parameters, masters, states)

    def _advance(self, visit: Visit) -> None:
        """Have the optimizer do its step on a chunk."""
        options = {name: value for name, value in visit.group.items() if name not in ("params", "param_names")}
        optimizer = self.optimizer([{**options, "params": visit.masters}], **self.options)
        pairs = zip(visit.masters, visit.states, strict=True)
        optimizer.state.update({master: state for master, state in pairs if state})
        optimizer.step()
        visit.states = [dict(optimizer.state[master]) for master in visit.masters]

    def _keep(self, visit: Visit) -> None:
        """Round the masters of a chunk to their parameters, and keep its state."""
        for parameter, master, state in zip(visit.parameters, visit.masters, visit.states, strict=True):
            if not self._is_own_master(parameter):
                random = self.rounding is not None and parameter.dtype == torch.bfloat16
                parameter.copy_(stochastic_round(master, self.rounding) if random else master)  # type: ignore[arg-type]
                self.versions[parameter] = parameter._version
                state["master"] = master.detach()
            self._store(parameter, state)

    def _master(self, parameter: nn.Parameter, master: Tensor | None) -> nn.Parameter:
        """Return what is to be updated, with its gradient: in the memory of the parameter, if that can be."""
        assert parameter.grad is not None
        if self._is_own_master(parameter):
            if self.factor != 1:
                parameter.grad.mul_(self.factor)
            twin = nn.Parameter(parameter.detach())  # the same memory; of a slice only its own optimizer may be told
            twin.grad = parameter.grad
            return twin
        written = self.versions.get(parameter) != parameter._version  # by somebody else; the same value, perhaps
        if master is None or (written and not _is_rounded(parameter, master)):
            master = self._widened(parameter.detach())
        twin = nn.Parameter(master)
        twin.grad = self._widened(parameter.grad).mul_(self.factor)
        return twin

    # What follows says where masters and state are: beside the parameters. `OffloadedOptimizer` says otherwise.

    def _is_own_master(self, parameter: Tensor) -> bool:
        return parameter.dtype == wide(parameter)

    def _widened(self, tensor: Tensor) -> Tensor:
        """Return a copy for a master, or for its gradient."""
        return tensor.to(wide(tensor), copy=True)

    def _copied(self, value: Any, parameter: Tensor) -> Any:
        """Copy a piece of loaded state to its place, widened; what has no dimensions or holds integers stays so."""
        if not isinstance(value, Tensor):
            return value
        if not value.dim():
            return value.clone()
        return value.to(self._place(parameter), wide(parameter) if value.is_floating_point() else None, copy=True)

    def _place(self, parameter: Tensor) -> torch.device:
        return parameter.device

    def _expect(self, parameters: dict[nn.Parameter, State]) -> None:
        """Claim room for the state of parameters, or raise before anything is changed."""

    def state_of(self, parameter: Tensor) -> State:
        """Return what is kept of a parameter: tensors of its shape, such as moments, and numbers."""
        return dict(self.state.get(parameter, {}))

    def _store(self, parameter: Tensor, state: State) -> None:
        if state:
            self.state[parameter] = state


def wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a tensor's master: float32, or its own if that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _is_rounded(parameter: Tensor, master: Tensor) -> bool:
    """Tell whether a parameter is its master rounded, up or down; if not, somebody has written another value."""
    limits = torch.finfo(parameter.dtype)
    smallest = limits.eps * limits.smallest_normal  # the distance of subnormal numbers
    return torch.allclose(parameter.to(master), master, rtol=limits.eps, atol=smallest)
