"""What a rank of an elastic run carries from one view into the next, and what it gets from a peer.

    rank 0   step 7 done                ──▶ holds step 7 ── weights, moments ──▶ a newcomer
    rank 1   ready for 7, not sure      ──▶ takes it now, and holds it too
    rank 2   lost

A step is *ready* on a rank once its gradients are summed and measured: the update then needs no
other rank (plain data parallelism). All ranks have come so far when any has heard the sum of the
losses. So if one has done the step, all that are left can do it, without a message; if none has,
nobody's weights have changed, and the step is taken again: at most one is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minidist.full.checkpoint.saving import held
from minidist.full.comm import Communicator
from minidist.full.comm.membership.agreement import View, Wanted
from minidist.full.ddp.sampler import State
from minidist.full.trainer.loop import Trainer
from minidist.full.trainer.metrics import StepMetrics


class Enters(Protocol):
    """A member of a job, as a run sees it; see `Member`."""

    wanted: Wanted
    view: View

    def enter(self, done: int = -1, place: int = 0) -> Communicator | None: ...

    def leave(self, reason: str) -> str: ...

    def lost(self, reason: str) -> None: ...

    def check(self) -> None: ...

    def is_awaited(self) -> bool: ...

    def finish(self, status: int = 0) -> None: ...


@dataclass(frozen=True)
class Standing:
    """What a rank holds of the run: plain data, which it tells the others.

    Attributes
    ----------
    done : int
        Steps that have led to it; -1: it holds nothing.
    ready : bool
        Whether the next step needs no other rank any more.
    place : int
        Its place in a replica.
    position, reached : State
        Where the batches stand after `done` steps, and after one more if that is ready.
    scaler : dict or None
        The state of the loss scaler.
    last : StepMetrics or None
        Of step `done`, if it was taken here.
    """

    done: int = -1
    ready: bool = False
    place: int = 0
    position: State = field(default_factory=dict)
    reached: State = field(default_factory=dict)
    scaler: dict[str, float] | None = None
    last: StepMetrics | None = None

    def holds(self, step: int) -> bool:
        """Tell whether the rank has what `step` steps have led to, or can have it by itself."""
        return 0 <= step in (self.done, self.done + self.ready)


class Carrier:
    """Carries one rank's part of the run through the views of its job.

    Attributes
    ----------
    newest : int
        The step after which the view goes on with what its ranks hold; -1: they hold nothing, or
        not all parts of a replica.
    """

    def __init__(self, member: Enters) -> None:
        self.member = member
        self.trainer: Trainer | None = None
        self.newest, self.standings = -1, [Standing()]

    @property
    def again(self) -> bool:
        """Whether the view is not the first of the job."""
        return self.member.view.number > 1

    @property
    def words(self) -> str:
        """Say how a view goes on that is not the first; nothing of the first."""
        if not self.again:
            return ""
        view = self.member.view
        if self.newest >= 0:
            held = f"after step {self.newest}"
        else:
            held = "from what was saved, or the beginning: no rank holds one part of the model now"
        ranks = "1 rank goes" if len(view.members) == 1 else f"{len(view.members)} ranks go"
        return f"view {view.number}: {ranks} on {held}\n"

    @property
    def standing(self) -> Standing:
        """What this rank holds."""
        trainer = self.trainer
        if trainer is None:
            return Standing()
        return Standing(
            trainer.done,
            trainer.ready is not None,
            trainer.comm.rank % self.member.wanted.together,
            trainer.position,
            trainer.reached or {},
            trainer.scaler.state_dict() if trainer.scaler else None,
            trainer.last,
        )

    def meet(self, comm: Communicator) -> None:
        """Find out with the other ranks of a view where it goes on, and take a step that is ready
        if others have taken it. Collective.
        """
        self.standings = comm.all_gather_object(self.standing)
        newest, mine = max(each.done for each in self.standings), self.standings[comm.rank]
        if self.trainer is not None and mine.done < newest and mine.holds(newest):
            self.trainer.finish_step()
            self.trainer.last = self._told(newest)
        there = {each.place for each in self.standings if each.holds(newest)}
        self.newest = newest if there == set(range(self.member.wanted.together)) else -1

    def settle(self) -> None:
        """Once a view is over, let nothing of it be written any more."""
        if self.trainer is not None and self.trainer.writer is not None:
            self.trainer.writer.abandon()

    def prepare(self, trainer: Trainer) -> None:
        """Let a new trainer begin where the view goes on, fetch what it needs once it is spread,
        and look after every step whether somebody waits outside.
        """
        trainer.recover = lambda: self._recover(trainer)
        trainer.check = self.member.check
        # one rank looks for all
        trainer.awaited = self.member.is_awaited if trainer.comm.rank == 0 else lambda: False
        if self.newest < 0:
            return
        holder = next(each for each in self.standings if each.done == self.newest)
        trainer.first_step = trainer.done = self.newest
        trainer.position = holder.position
        trainer.start.batches.load_state_dict(holder.position)
        if trainer.scaler is not None and holder.scaler is not None:
            trainer.scaler.load_state_dict(holder.scaler)
        trainer.last = self._told(self.newest)

    def _told(self, step: int) -> StepMetrics | None:
        """Return what is known of a step, from a rank that has heard the sum of its losses."""
        known = (each.last for each in self.standings if each.last is not None)
        return next((last for last in known if last.step == step), None)

    def _recover(self, trainer: Trainer) -> None:
        """Fill the parameters and the optimizer of a trainer. Collective.

        Cost: nothing for a rank that holds its part; else the bytes of its parameters and their
        moments, from one peer along the data axis.
        """
        if self.newest >= 0:
            self._fill(trainer)
        self.trainer = trainer

    def _fill(self, trainer: Trainer) -> None:
        comm, old = trainer.mesh.dp, self.trainer
        standings = [self.standings[rank] for rank in comm.members]
        places = [rank % self.member.wanted.together for rank in comm.members]
        holders: dict[int, list[int]] = {place: [] for place in places}
        for rank, each in enumerate(standings):
            if each.holds(self.newest) and each.place in holders:
                holders[each.place].append(rank)
        held = dict(tensors_of(old)) if old and standings[comm.rank].holds(self.newest) else {}
        # a step's number lies on the CPU, also beside a GPU
        shapes = comm.all_gather_object(
            [(name, each.shape, each.dtype, each.is_cuda) for name, each in held.items()]
        )
        mine = held
        needy = [(rank, place) for rank, place in enumerate(places) if rank not in holders[place]]
        for number, (rank, place) in enumerate(needy):
            source = holders[place][number % len(holders[place])]
            if comm.rank == source:
                for tensor in held.values():
                    comm.send(tensor, to=rank)
            elif comm.rank == rank:
                mine = {
                    name: torch.empty(shape, dtype=dtype, device="cuda" if on_gpu else "cpu")
                    for name, shape, dtype, on_gpu in shapes[source]
                }
                for tensor in mine.values():
                    comm.recv(tensor, source=source)
        load(trainer, mine)


def tensors_of(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    """Yield what a rank updates and the state of its optimizer: parameters by their serial names,
    `name/moment` beside each.
    """
    for name, _, parameter in held(trainer.parallel):
        yield name, parameter.detach().contiguous()
        for moment, value in trainer.optimizer.state_of(parameter).items():
            yield f"{name}/{moment}", torch.as_tensor(value).contiguous()


def load(trainer: Trainer, tensors: dict[str, Tensor]) -> None:
    """Fill what a rank updates, and its optimizer, with what `tensors_of` has yielded. Collective."""
    states: dict[nn.Parameter, dict[str, Any]] = {}
    with torch.no_grad():
        for name, _, parameter in held(trainer.parallel):
            parameter.copy_(tensors[name])
            states[parameter] = {
                full.removeprefix(f"{name}/"): value
                for full, value in tensors.items()
                if full.startswith(f"{name}/")
            }
    trainer.optimizer.restore(states)
    trainer.parallel.stepped()
