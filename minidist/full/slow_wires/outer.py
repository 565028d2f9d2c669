"""DiLoCo for any model: in fragments, while training goes on, for slices and 16-bit parameters.

    H = 4, F = 2, delay 1      step   1     2     3     4     5     6     7     8
    fragment 0                              send  merge             send  merge
    fragment 1                                          send  merge             send

What a site learns while a fragment travels is lost where mixing is 0. (Douillard et al. 2025,
Streaming DiLoCo, algorithm 2.)

Cost: a fragment of n bytes, 2 (P - 1)/P n bytes every H steps, in float32 where parameters have 16
bits. Memory in addition to that of the book's `DiLoCo`: what is sent, n bytes.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator
from minidist.full.comm.stream import Handle
from minidist.full.ddp.flatten import views_into
from minidist.full.placement import placement_of
from minidist.full.precision.masters import MasterWeights, wide


class OuterStep(Protocol):
    """What an outer step travels as."""

    kept: dict[str, Tensor]
    """Flat, by its name in a checkpoint: what it keeps from one meeting to the next."""

    def reduce(self, change: Tensor, comm: Communicator) -> None:
        """Replace this site's change by about the mean of all sites'. Collective."""

    def bytes(self, sites: int) -> float:
        """Return what a rank sends for it."""


class Whole:
    """An outer step that travels as it is; it is `like` a flat tensor."""

    def __init__(self, like: Tensor) -> None:
        self.size = like.nbytes
        self.kept: dict[str, Tensor] = {}

    def reduce(self, change: Tensor, comm: Communicator) -> None:
        """Replace this site's change by the mean of all sites'. Collective."""
        all_reduce(change, comm, "mean")

    def bytes(self, sites: int) -> float:
        """Return what a rank sends for it."""
        return 2 * (sites - 1) / sites * self.size


class Meetings(NamedTuple):
    """When sites meet, and what becomes of it; see `SiteOptions`.

    `travels(like)` returns what a flat outer step like this travels as. If it `chooses`, what is
    sent of an element depends on the others that travel with it.
    """

    every: int
    lr: float = 0.7
    momentum: float = 0.9
    fragments: int = 1
    delay: int = 0
    mixing: float = 0.0
    travels: Callable[[Tensor], OuterStep] = Whole
    chooses: bool = False

    def due(self, fragment: int) -> int:
        """Return the step after which a fragment is sent for the first time."""
        return (fragment + 1) * self.every // self.fragments


class Fragment:
    """Parameters that are sent together.

    Attributes
    ----------
    due : int
        It is sent after this step, and then every H steps.
    kept : dict of str to Tensor
        Flat, by its name in a checkpoint, as far as there is such a thing: what all sites share,
        the momentum of the outer optimizer, what was sent and has come, and what the step keeps.
    shared, change : Tensor
        Flat: what all sites share; and what this site has subtracted from it, and then what all
        have, on average.
    coming : Handle or None
        What to wait for, while `change` travels.
    """

    def __init__(self, parameters: list[nn.Parameter], due: int, meetings: Meetings) -> None:
        self.parameters, self.due = parameters, due
        dtype, device = wide(parameters[0]), parameters[0].device
        sizes = [parameter.numel() for parameter in parameters]
        self.shared = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self.change = torch.zeros_like(self.shared)
        self.kept = {"outer shared": self.shared}
        self.velocity: Tensor | None = None
        if meetings.momentum:
            self.velocity = self.kept["outer momentum"] = torch.zeros_like(self.shared)
        if meetings.delay:
            self.kept["outer change"] = self.change
        self.step = meetings.travels(self.shared)
        self.kept |= self.step.kept
        self.coming: Handle | None = None

    def send(self, comm: Communicator) -> None:
        """Replace what this site has subtracted by the mean of all sites. Collective."""
        self.step.reduce(self.change, comm)

    def arrive(self) -> None:
        """Wait for what travels."""
        coming, self.coming = self.coming, None
        if coming is not None:
            coming.wait()


class Outer:
    """The outer optimizer that accompanies an inner optimizer. It is a `Companion`.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The inner optimizer. Its parameters are the same on all sites now.
    fragment_of : mapping
        The number of the fragment of each of these parameters that is trained, from 0.
    comm : Communicator
        The sites.
    meetings : Meetings
        When, and how.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        fragment_of: Mapping[nn.Parameter, int],
        comm: Communicator,
        meetings: Meetings,
    ) -> None:
        self.optimizer, self.comm, self.meetings = optimizer, comm, meetings
        self.stream = comm.stream() if meetings.delay and comm.size > 1 else None
        self.steps = torch.zeros((), dtype=torch.int64)
        members: dict[tuple[object, ...], list[nn.Parameter]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    kind: tuple[object, ...] = fragment_of[parameter], wide(parameter)
                    if meetings.chooses:  # ranks that have copies choose the same of their elements
                        kind = *kind, placement_of(parameter).alike
                    members.setdefault(kind, []).append(parameter)
        self.fragments = []
        for parameters in sorted(members.values(), key=lambda several: fragment_of[several[0]]):
            due = meetings.due(fragment_of[parameters[0]])
            self.fragments.append(Fragment(parameters, due, meetings))
        self.fragment_with = {
            parameter: fragment for fragment in self.fragments for parameter in fragment.parameters
        }
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Begin anew, from what the parameters are now: the same on all sites."""
        self.steps.zero_()
        for fragment in self.fragments:
            fragment.arrive()
            for flat in fragment.kept.values():
                flat.zero_()
            self._copy_into(fragment.shared, fragment)

    def beside(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return what is kept for a parameter, by its name in a checkpoint; wait for what travels."""
        fragment = self.fragment_with.get(parameter)
        if fragment is None:
            return {}
        fragment.arrive()
        at = next(n for n, each in enumerate(fragment.parameters) if each is parameter)
        found = {
            name: views_into(flat, fragment.parameters)[at] for name, flat in fragment.kept.items()
        }
        return found | self.counts()

    def counts(self) -> dict[str, Tensor]:
        """Return how many steps the inner optimizer has taken since `begin`."""
        return {"outer steps": self.steps}

    def volume(self, before: int, after: int) -> float:
        """Return the bytes that this rank sends between two numbers of steps, by formula."""
        sent = 0.0
        for fragment in self.fragments:
            steps = range(fragment.due, after + 1, self.meetings.every)
            sent += fragment.step.bytes(self.comm.size) * sum(step > before for step in steps)
        return sent

    def held(self) -> dict[str, list[Tensor]]:
        """Return this rank's tensors by category, for `Account`."""
        kept = [flat for fragment in self.fragments for flat in fragment.kept.values()]
        travel = [fragment.change for fragment in self.fragments]
        return {"optimizer": kept, "communication": travel}

    def meets_next(self) -> bool:
        """Tell whether something is sent after the next step: by any rank of the site, which may
        have other fragments, so that all of them say the same.
        """
        dues = map(self.meetings.due, range(self.meetings.fragments))
        return any(self._since(due, ahead=1) == 0 for due in dues)

    @torch.no_grad()
    def stepped(self) -> None:
        """Count a step of the inner optimizer; send and merge what is due.

        Collective when something is due, which it is at the same steps on all sites.
        """
        self.steps += 1
        for fragment in self.fragments:
            if self._since(fragment.due) == 0:
                self._send(fragment)
            if self._since(fragment.due) == self.meetings.delay:
                self._merge(fragment)

    def _since(self, due: int, ahead: int = 0) -> int:
        """Return how many steps ago the fragment that was due then was sent, counted from now or
        from some steps ahead; -1: never.
        """
        passed = int(self.steps) + ahead - due
        return passed % self.meetings.every if passed >= 0 else -1

    def _send(self, fragment: Fragment) -> None:
        """Begin to average what the sites' steps have subtracted."""
        self._copy_into(fragment.change, fragment)
        torch.sub(fragment.shared, fragment.change, out=fragment.change)
        if self.stream is None:
            fragment.send(self.comm)
        else:
            fragment.coming = self.stream.launch(fragment.send, self.stream.comm)

    def _merge(self, fragment: Fragment) -> None:
        """Take the outer step, and go on from there."""
        fragment.arrive()
        shared, step, meetings = fragment.shared, fragment.change, self.meetings
        if fragment.velocity is not None:
            fragment.velocity.mul_(meetings.momentum).add_(step)
            step = step.add(fragment.velocity, alpha=meetings.momentum)
        shared.sub_(step, alpha=meetings.lr)
        for parameter, ours in zip(
            fragment.parameters, views_into(shared, fragment.parameters), strict=True
        ):
            values = ours
            if meetings.mixing:
                values = ours.lerp(self._master(parameter).to(ours), meetings.mixing)
            self._overwrite(parameter, values)

    def _copy_into(self, flat: Tensor, fragment: Fragment) -> None:
        """Copy what the inner optimizer updates, end to end."""
        places = views_into(flat, fragment.parameters)
        for parameter, place in zip(fragment.parameters, places, strict=True):
            place.copy_(self._master(parameter))

    def _master(self, parameter: nn.Parameter) -> Tensor:
        """Return what the inner optimizer updates, as precise as it knows it."""
        if isinstance(self.optimizer, MasterWeights):
            return self.optimizer.master_of(parameter)
        return parameter.detach()

    def _overwrite(self, parameter: nn.Parameter, values: Tensor) -> None:
        if isinstance(self.optimizer, MasterWeights):
            self.optimizer.overwrite(parameter, values)
        else:
            parameter.copy_(values)
