"""The execution of any plan: receives are posted early, and no send is waited for.

It also frees outputs once they are sent, lets several tensors go from stage to stage, and allows
frozen stages, a parameter that the first and the last stage share, and a data axis.

    plan       here
    2F0        `Run.forward`: microbatch 0 through stage 2
    2SEND_F0   `Run.send`: the output to stage 3; it is freed when it has arrived
    3RECV_F0   `Run.receive` posts it, and `Run.take` waits for it, where it is used
    2B0        `Run.backward`, from the gradient that stage 3 has sent
    2I0, 2W0   the same in two: for the input now, for the weights later (Qi et al. 2023)
    2R         with the last R of a rank, gradients become their sums over the data axis
    2OFF0      the weights of a stage that waits begin to leave for host memory (`HostMemory`)
    2FETCH0    they begin to come back; the stage's next action waits for them

The plan says everything else: this file knows no schedule, only what each kind of action does
(`DO`). Each tensor that goes from stage to stage is sent once in forward, and its gradient once in
backward. If there are several, a stage returns a tuple, and the next stage is called with all of
them. Integers, such as a mask, have no gradient, and none is sent.

No message is prepared (`full/collectives/prepared/`): there is nothing to choose, and a persistent request
takes memory that stays. It would save 10 microseconds a message, and copying half a megabyte of
activations there takes 40.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from minidist.full.comm import Communicator
from minidist.full.pipeline.actions import BACKWARDS, COMPUTING, FLOWS, Action, Kind, Plan
from minidist.full.pipeline.communicate import with_communication
from minidist.full.pipeline.offload.host import HostMemory
from minidist.full.pipeline.weight_gradients import Product, WeightGradients, compute
from minidist.full.placement import sum_tied
from minidist.full.replica import Alone, Replica, no_loss

Tensors: TypeAlias = tuple[Tensor, ...]


class Pipeline:
    """One rank's stages of a model, and how they take a step together with the other ranks'.

    Parameters
    ----------
    stages : mapping of int to nn.Module
        This rank's, by number; see `take_stages`.
    comm : Communicator
        The ranks of the pipeline axis.
    plan : Plan
        With sends and receives, and with reductions if there is a `replica`.
    loss : callable
        `loss(output, target)` of the last stage, a scalar; gradients of all microbatches are
        summed.
    carried : callable
        `carried(inputs)` is an empty tensor (on any device) of the shape and dtype that goes from
        stage to stage for a microbatch with these inputs; or a tuple of such tensors.
    tied : sequence of parameters
        Those of this rank's stages that the first and the last stage share; see `tie_stages`.
    replica : Replica, optional
        Reduces the gradients of all this rank's stages over the data axis, when the plan says so. A
        strategy that reduces while backward runs begins in the backward before.
    fused
        Whether gradients of weights that nobody else accumulates are added up by the product
        itself, not by autograd. Compiled blocks are better off without: autograd's are compiled,
        too.

    Raises
    ------
    ValueError
        If these are not the stages that the plan gives this rank; if the plan has reductions, but
        there is no `replica`, or the other way round; if weights are to leave that cannot.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        comm: Communicator,
        plan: Plan,
        loss: Callable[[Tensor, Any], Tensor],
        carried: Callable[[Any], Tensor | Tensors],
        tied: Sequence[nn.Parameter] = (),
        replica: Replica | None = None,
        fused: bool = True,
    ) -> None:
        mine = plan.stages_of(comm.rank)
        if sorted(stages) != mine:
            raise ValueError(
                f"rank {comm.rank} brings stages {sorted(stages)}, but the plan gives it {mine}"
            )
        self.tied, self.replica = tied, replica or Alone(nn.ModuleList(stages.values()))
        if plan.reduces == self.replica.alone:
            fault = f"replica= is given, but the plan {plan.name} does not reduce gradients"
            if plan.reduces:
                fault = f"no replica= is given, but the plan {plan.name} reduces gradients"
            raise ValueError(
                f"{fault} over a data axis: make it with with_communication(plan, "
                f"reduce={not self.replica.alone})"
            )
        self.stages, self.comm, self.plan = dict(stages), comm, plan
        self.loss, self.carried = loss, carried
        # One communicator each way: on NCCL, a receive that is posted early delays later sends of
        # its communicator.
        self.wires = {Kind.FORWARD: comm, Kind.BACKWARD: comm.split(0)}
        self.device = next(p.device for module in self.stages.values() for p in module.parameters())
        self.weights = WeightGradients()
        mine_leaving = {a.stage for a in plan.actions[comm.rank] if a.kind == Kind.OFFLOAD}
        self.host = HostMemory(self.stages, sorted(mine_leaving))
        # seconds of the last step in which this rank computed or reduced; in the others it was idle
        self.busy = 0.0
        put_off = any(action.kind == Kind.WEIGHTS for actions in plan.actions for action in actions)
        if put_off or (fused and self.replica.alone):
            for module in self.stages.values():
                self.weights.take_over(module)

    def step(
        self, inputs: Sequence[Any], targets: Sequence[Any], *arguments: Sequence[Any]
    ) -> Tensor:
        """Run the plan once.

        Return the sum of the losses on the rank of the last stage, and zero on the others.

        Parameters
        ----------
        inputs, targets : sequences
            One for each microbatch, on every rank. Ranks that do not need the values read the
            shapes.
        arguments : sequences
            Further arguments of every stage's module, one for each microbatch.

        Gradients are added to `parameter.grad`, summed over the data axis and over the copies of
        tied parameters.
        """
        count = self.plan.microbatches
        if not len(inputs) == len(targets) == count:
            raise ValueError(
                f"{len(inputs)} inputs and {len(targets)} targets, but the plan has {count} "
                "microbatches"
            )
        run = Run(self, inputs, targets, arguments)
        actions = self.plan.actions[self.comm.rank]
        backwards = [
            at for at, each in enumerate(actions) if each.kind in BACKWARDS and self.plan.reduces
        ]
        last = max(backwards, default=None)
        self.host.begin()
        try:
            for at, action in enumerate(actions):
                # The last backward reduces gradients over the data axis; or each backward, if they
                # are not kept whole.
                reduces = at == last or not self.replica.whole_gradients
                with nullcontext() if reduces else self.replica.no_sync():
                    run.do(action)
        finally:
            self.host.finish()  # an error leaves no parameter without its values
        run.finish()
        self.busy = run.busy
        for parameter in self.tied:
            sum_tied(self.replica.slice_of(parameter))
        return run.total

    def evaluate(
        self, inputs: Sequence[Any], targets: Sequence[Any], *arguments: Sequence[Any]
    ) -> Tensor:
        """Run the forwards of the plan alone, under `torch.no_grad`; return what `step` does."""
        run = Run(self, inputs, targets, arguments)
        for action in self.forward_alone.actions[self.comm.rank]:
            run.do(action)
            run.entered.clear()  # nobody will ask for the gradients of these
            run.left.clear()
        run.finish()
        return run.total

    def forward(self, action: Action, *arguments: Any) -> Any:
        """Run a stage on a microbatch."""
        return self.stages[action.stage](*arguments)

    def update(self, action: Action) -> None:
        """Step the optimizer of a stage."""
        raise NotImplementedError(f"{action}: only plans of many batches have updates")

    @cached_property
    def forward_alone(self) -> Plan:
        """What is left of the plan in evaluation: its forwards in their order, and their
        messages.
        """
        rows = (
            tuple(action for action in row if action.kind == Kind.FORWARD)
            for row in self.plan.actions
        )
        return with_communication(replace(self.plan, actions=tuple(rows)))


class Run:
    """One step: it knows what has arrived, what waits for its backward, and what is on its way."""

    def __init__(
        self,
        pipeline: Pipeline,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        arguments: tuple[Sequence[Any], ...],
    ) -> None:
        self.pipeline, self.inputs = pipeline, inputs
        pipeline.replica.follow()
        self.targets, self.arguments = targets, arguments
        self.total = no_loss(pipeline.device)
        self.receiving: dict[Action, list[tuple[Any, Tensor]]] = {}
        self.ready: dict[Action, Tensors] = {}  # to be sent, or handed to a stage on this rank
        # the inputs of a stage, for their gradients
        self.entered: dict[tuple[int, int], Tensors] = {}
        # where backward begins, without the outputs themselves
        self.left: dict[tuple[int, int], list[Any]] = {}
        self.put_off: dict[tuple[int, int], list[Product]] = {}
        self.sending: list[tuple[Any, Tensor]] = []
        self.unreduced = set(pipeline.stages)
        self.busy = 0.0  # seconds without those in which it waited for another stage

    def do(self, action: Action) -> None:
        """Carry out one action."""
        if action.kind in COMPUTING:
            self.pipeline.host.ready(action.stage)
        comm, started = self.pipeline.comm, self.pipeline.comm.clock()
        # a reduction has spans of its own
        with nullcontext() if action.kind == Kind.REDUCE else comm.span(str(action)):
            DO[action.kind](self, action)
        if not action.communicates:
            self.busy += comm.clock() - started

    def forward(self, action: Action) -> None:
        """Run a stage on what has come for it."""
        _, stage, microbatch = action
        entering = self.take(action) if stage > 0 else (self.inputs[microbatch],)
        if stage > 0:
            inputs = differentiable(entering)
            self.entered[stage, microbatch] = tuple(x.requires_grad_() for x in inputs)
        more = [several[microbatch] for several in self.arguments]
        y = self.pipeline.forward(action, *entering, *more)
        last = stage + 1 == self.pipeline.plan.stages
        leaving = self.loss_of(action, y) if last else self.pass_on(action, y)
        self.left[stage, microbatch] = [
            get_gradient_edge(t) if t.requires_grad else None for t in differentiable(leaving)
        ]

    def pass_on(self, action: Action, y: Any) -> Tensors:
        """Lay the output of a stage ready for the next one; return it."""
        leaving = y if isinstance(y, tuple) else (y,)
        values = tuple(tensor.detach() for tensor in leaving)
        self.ready[action._replace(stage=action.stage + 1)] = values
        return leaving

    def loss_of(self, action: Action, y: Any) -> Tensors:
        """Compute the loss of the last stage's output, and lay its gradient, 1, ready; return the
        loss.
        """
        loss = self.pipeline.loss(y, self.targets[action.microbatch])
        self.total = self.total + loss.detach()
        self.ready[action._replace(kind=Kind.BACKWARD)] = (torch.ones_like(loss),)
        return (loss,)

    def backward(self, action: Action) -> None:
        """Run backward through a stage, from the gradients that have come."""
        _, stage, microbatch = action
        came = self.take(action._replace(kind=Kind.BACKWARD))
        pairs = list(zip(self.left.pop((stage, microbatch)), came, strict=True))
        edges = [edge for edge, _ in pairs if edge is not None]
        gradients = [gradient for edge, gradient in pairs if edge is not None]
        self.free_sent()  # this microbatch's output at least: its gradient is here
        if edges:  # else all is frozen up to here
            torch.autograd.backward(edges, gradients)
        if stage > 0:
            entered = self.entered.pop((stage, microbatch))
            self.ready[Action(Kind.BACKWARD, stage - 1, microbatch)] = tuple(
                torch.zeros_like(x) if x.grad is None else x.grad for x in entered
            )

    def backward_of_inputs(self, action: Action) -> None:
        """Run backward through a stage, and put the gradients of its weights off."""
        weights = self.pipeline.weights
        weights.put_off = True
        try:
            self.backward(action)
        finally:
            weights.put_off = False
        self.put_off[action.stage, action.microbatch] = weights.take()

    def backward_of_weights(self, action: Action) -> None:
        """Compute the gradients of weights that were put off."""
        compute(self.put_off.pop((action.stage, action.microbatch)))

    def take(self, key: Action) -> Tensors:
        """Wait for what a stage needs, and return it: the output of the stage before, or the
        gradient of its own.
        """
        if key in self.ready:  # it comes from a stage on this rank
            return self.ready.pop(key)
        coming, started = self.receiving.pop(key), self.pipeline.comm.clock()
        for request, _ in coming:
            request.wait()
        self.busy -= self.pipeline.comm.clock() - started
        return tuple(tensor for _, tensor in coming)

    def send(self, action: Action) -> None:
        """Begin to send what a stage has made to the stage that needs it."""
        way, to = FLOWS[action.kind].content, action.neighbour
        self.free_sent()
        for number, tensor in enumerate(self.ready.pop(Action(way, to, action.microbatch))):
            tensor = tensor.contiguous()
            request = self.pipeline.wires[way].isend(tensor, *self.address(action, to, number))
            self.sending.append((request, tensor))

    def free_sent(self) -> None:
        """Free what has arrived at the other end."""
        self.sending = [(request, tensor) for request, tensor in self.sending if not request.test()]

    def receive(self, action: Action) -> None:
        """Begin to receive what a stage will need."""
        way = FLOWS[action.kind].content
        carried = self.pipeline.carried(self.inputs[action.microbatch])
        likes = carried if isinstance(carried, tuple) else (carried,)
        coming = []
        for number, like in enumerate(likes if way == Kind.FORWARD else differentiable(likes)):
            tensor = torch.empty(like.shape, dtype=like.dtype, device=self.pipeline.device)
            source, tag = self.address(action, action.stage, number)
            coming.append((self.pipeline.wires[way].irecv(tensor, source, tag), tensor))
        self.receiving[action._replace(kind=way)] = coming

    def address(self, action: Action, stage: int, number: int) -> tuple[int, int]:
        """Return the rank at the other end of a message, and the tag of tensor `number` for a
        stage.

        The tag is different from all others between the same ranks.
        """
        plan = self.pipeline.plan
        return plan.rank_of[action.neighbour], stage + number * plan.stages

    def reduce(self, action: Action) -> None:
        """At the last reduction of this rank, reduce the gradients of all its stages, which share
        buckets.
        """
        self.unreduced.remove(action.stage)
        if not self.unreduced:
            self.finish()
            self.pipeline.replica.synchronize()

    def update(self, action: Action) -> None:
        """Step the optimizer of a stage."""
        self.pipeline.update(action)

    def offload(self, action: Action) -> None:
        """Let the weights of a stage that waits leave.

        They do not change within a step, so the first copy is good for all of it.
        """
        self.pipeline.host.offload(action.stage, copy=action.microbatch == 0)

    def fetch(self, action: Action) -> None:
        """Begin to bring them back."""
        self.pipeline.host.fetch(action.stage)

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for request, _ in self.sending:
            request.wait()


DO: Mapping[Kind, Callable[[Run, Action], None]] = {
    Kind.FORWARD: Run.forward,
    Kind.BACKWARD: Run.backward,
    Kind.INPUTS: Run.backward_of_inputs,
    Kind.WEIGHTS: Run.backward_of_weights,
    Kind.SEND_OUTPUT: Run.send,
    Kind.SEND_GRADIENT: Run.send,
    Kind.RECEIVE_OUTPUT: Run.receive,
    Kind.RECEIVE_GRADIENT: Run.receive,
    Kind.REDUCE: Run.reduce,
    Kind.UPDATE: Run.update,
    Kind.OFFLOAD: Run.offload,
    Kind.FETCH: Run.fetch,
}
"""How a rank carries out an action of each kind."""


def differentiable(tensors: Sequence[Tensor]) -> Tensors:
    """Return the tensors that can have a gradient."""
    return tuple(tensor for tensor in tensors if tensor.is_floating_point())
