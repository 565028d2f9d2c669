"""Forward and backward of a model of units: which hook gathers, frees or reduces what.

    hook on                                calls               which
    a unit's module, before its forward    `pre_forward`       gathers the unit, and begins with the next
    a unit's module, after its forward     `post_forward`      frees it
    the gradient of its output             `pre_backward`      gathers it again
    the gradients of its inputs            `post_backward`     frees it
    the gradient of a parameter            `gradient_arrived`  reduces a unit whose gradients have all come
    the end of backward                    `_backward_ended`   reduces what is left

The verbs are those of torch's `FSDPState`. The `Window` knows which unit comes next; when to
gather it in backward is decided here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minidist.full.comm.stream import Handle
from minidist.full.ddp.backward import BackwardEnd, Hook, followed, recomputing
from minidist.full.ddp.strategy import ExpectedGradients
from minidist.full.fsdp.flat import Flat
from minidist.full.fsdp.policy import cast
from minidist.full.fsdp.unit import TrainingState, Unit, tensors_in
from minidist.full.fsdp.window import Window


class Passes:
    """What happens to the units of a model while it runs.

    Parameters
    ----------
    window : Window
        The units.
    expected : ExpectedGradients
        Which gradients must come, and whether they are reduced in this backward.
    op : str
        How the gradients of all ranks are joined.
    reshard_after_forward : bool
        As for `FSDP`.
    hooks : list
        All hooks of the model; those made here are added.

    Attributes
    ----------
    used : set[nn.Parameter]
        Those that got a gradient since the gradients were zeroed.
    in_forward, in_backward : Unit or None
        Which unit runs now, beside the root.
    to_reduce : list[Unit]
        Those whose gradients are still to be reduced, in the order in which all ranks do it.
    """

    def __init__(
        self,
        window: Window,
        expected: ExpectedGradients,
        op: str,
        reshard_after_forward: bool,
        hooks: list[Any],
    ) -> None:
        self.window, self.root, self.ranks = window, window.root, window.ranks
        self.expected = expected
        self.op, self.reshard_after_forward, self.hooks = op, reshard_after_forward, hooks
        self.place_of = {
            parameter: (unit, flat)
            for unit in window.units
            for flat in unit.trained
            for parameter in flat.parameters
        }
        self.used: set[nn.Parameter] = set()
        self.in_forward: Unit | None = None
        self.in_backward: Unit | None = None
        self.to_reduce: list[Unit] = []
        self.reducing: Handle | None = None
        # A GPU is still to compute the gradients that have "arrived" here: to gather then would be
        # to wait for them.
        self.ahead_of_time = any(flat.device.type == "cuda" for _, flat in self.place_of.values())
        self.end = BackwardEnd(self._backward_ended, expected.comm)
        for unit in window.units:
            before, after = UnitHook(self.pre_forward, unit), Hook(self.post_forward, unit)
            # Before all other hooks: some, such as those of weight_norm, use the parameters.
            hooks.append(
                unit.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            )
            hooks.append(unit.module.register_forward_hook(after))
        for parameter in expected.parameters:
            arrived = Hook(self.gradient_arrived, whose=expected.strategy)
            hooks.append(parameter.register_post_accumulate_grad_hook(arrived))  # type: ignore[no-untyped-call]

    # ---------------------------------------------------------------- forward

    def as_forward(self, unit: Unit, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call another method of a unit as if it were its forward.

        See `register_fsdp_forward_method`.
        """
        if unit.training_state is not TrainingState.IDLE:
            return method(*args, **kwargs)  # called from within the unit: its parameters are whole
        args, kwargs = self.pre_forward(unit, unit.module, args, kwargs)
        # Now the unit is in its forward, or idle, if that is recomputed.
        before, unit.training_state = unit.training_state, TrainingState.METHOD
        try:
            output = method(*args, **kwargs)
        finally:
            unit.training_state = before
        return self.post_forward(unit, unit.module, args, output)

    def pre_forward(self, unit: Unit, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather a unit, and return its inputs, so hooked that it is freed when their gradients
        have come in backward.
        """
        if unit.training_state is TrainingState.METHOD:
            return args, kwargs
        unit.began = torch._C._autograd._get_sequence_nr()
        if unit.precision.parameters is not None:
            args, kwargs = cast((args, kwargs), unit.precision.parameters)
        if recomputing():  # a part of forward again, in backward
            self.window.unshard(unit, None, self.in_backward)
        else:
            self._enter(unit)
        if unit is self.root or not torch.is_grad_enabled():
            return args, kwargs
        return followed((args, kwargs), Hook(self.post_backward, unit))

    def _enter(self, unit: Unit) -> None:
        if unit is self.root:
            if self.in_forward is not None:  # its forward has raised
                self.in_forward.training_state = TrainingState.IDLE
            self.in_forward = self.in_backward = None
        elif self.in_forward is not None:
            raise RuntimeError(
                f"{self.in_forward.name} calls {unit.name}, and to gather the inner unit may free "
                "the outer one, which is in use: let a policy choose only one of them"
            )
        else:
            self.in_forward = unit
        unit.training_state = TrainingState.FORWARD
        self.window.enter(unit)

    def post_forward(self, unit: Unit, module: nn.Module, _: Any, output: Any) -> Any:
        """Free a unit, and return its output, so hooked that it is gathered when its gradient
        comes.
        """
        if unit.training_state is TrainingState.METHOD:
            return output
        if unit.training_state is TrainingState.FORWARD:
            unit.training_state = TrainingState.IDLE
        self.in_forward = None
        output = unit.apart(output)
        if torch.is_grad_enabled() and not any(True for _ in tensors_in(output)):
            raise TypeError(
                f"{unit.name or 'the model'} returns a {type(output).__name__} in which no "
                "tensors can be seen, so FSDP cannot know when its backward begins: return tensors, "
                "or tuples, lists or dictionaries of them"
            )
        if unit is self.root:
            self.ranks.pass_ended("forward")
            self.window.forward_ended()
        made = unit.made(output)
        for tensor in made:
            tensor.register_hook(Hook(self.pre_backward, unit))  # type: ignore[no-untyped-call]
        if unit.precision.output is not None:
            output = cast(output, unit.precision.output)
        if not made or (self.reshard_after_forward and unit not in (self.root, self.in_backward)):
            self.window.reshard(unit)
        return output

    # ---------------------------------------------------------------- backward

    def _backward_runs(self) -> None:
        """Prepare, if this is the first that is heard of a backward."""
        self.expected.refuse_graphs()
        if not self.end.expect():
            return
        self.window.unshard(self.root, self.window.ahead(self.root))
        self._expect_all()
        for unit in self.window.units:
            unit.arrived.clear()

    def _expect_all(self) -> None:
        self.to_reduce = [unit for unit in self.window.in_backward() if unit.parameters]

    def pre_backward(self, unit: Unit, _: Tensor) -> None:
        """The gradient of a unit's output has come: its parameters are needed now."""
        self._backward_runs()
        if unit not in (self.root, self.in_backward):
            self.in_backward = unit
            at_once = self.ahead_of_time or not unit.parameters
            self.window.unshard(unit, self.window.ahead(unit) if at_once else None)

    def post_backward(self, unit: Unit) -> None:
        """The gradients of a unit's inputs have come: its parameters are no longer needed."""
        self.window.reshard(unit)
        if self.in_backward is unit:
            self.in_backward = None

    def gradient_arrived(self, parameter: nn.Parameter) -> None:
        """Autograd has added to `parameter.grad`."""
        self._backward_runs()
        unit, flat = self.place_of[parameter]
        if unit not in (self.root, self.in_backward):
            raise RuntimeError(
                f"{self.expected.names[parameter]} was used outside the forward of its unit {unit.name}, "
                "or for what that does not return: return all that the loss needs, or pass a "
                "policy that does not choose this unit"
            )
        self.expected.check_arrival(parameter, unit.arrived)
        if not self.expected.synchronising or flat.accumulated is not None:
            flat.collect([parameter])
        unit.arrived.add(parameter)
        self.used.add(parameter)
        half_done = 2 * len(unit.arrived) >= len(unit.parameters)
        ahead = self.window.ahead(unit)
        if ahead is not None and unit is self.in_backward and half_done:
            # not before about half its activations are free
            self.window.prefetch(ahead, unit)
        if self.expected.synchronising:
            self._reduce_ready()

    def _reduce_ready(self, all_of_them: bool = False) -> None:
        """Reduce the complete units at the head of `to_reduce`; at most two units' gradients wait
        for it at a time.
        """
        while self.to_reduce and (all_of_them or self.to_reduce[0].all_arrived):
            unit = self.to_reduce.pop(0)
            if self.reducing is not None:
                self.reducing.wait()
            gradients = [(flat, flat.take_gradients()) for flat in unit.trained]
            self.reducing = self.ranks.stream.launch(self._reduce, unit.name, gradients)

    def _reduce(self, name: str, gradients: list[tuple[Flat, Tensor]]) -> None:
        """Add this rank's shard of all ranks' gradients to what it has. Runs on the stream."""
        self.ranks.step(f"reduce the gradients of {name or 'the root unit'}")
        for flat, gradient in gradients:
            flat.reduce(gradient, self.op)

    def _backward_ended(self) -> None:
        self.in_backward = None
        if self.expected.synchronising and any(unit.arrived for unit in self.window.units):
            self._reduce_rest()
        else:
            self.ranks.pass_ended("backward")
        self.window.reshard_all()

    def _reduce_rest(self) -> None:
        self._reduce_ready(all_of_them=True)
        self.ranks.pass_ended("backward")
        assert self.reducing is not None, "some gradients have arrived"
        self.reducing.wait()
        self.reducing = None
        self.expected.check_parameters(self.root.module)
        self.expected.drop_unused(self.used)
        for unit in self.window.units:
            for flat in unit.flats:
                flat.shard.give_gradient(self.expected.nowhere_used)

    def synchronize(self) -> None:
        """Reduce what `no_sync` has only added up, if no later backward has reduced it."""
        if any(flat.accumulated is not None for unit in self.window.units for flat in unit.flats):
            self._expect_all()
            self._reduce_rest()


class UnitHook(Hook):
    """The hook before a unit's forward, by which the unit's module is known as such."""
