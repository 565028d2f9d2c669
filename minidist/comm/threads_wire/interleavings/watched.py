"""What each step of a rank has touched, so that steps which touch nothing in common need not be
swapped.

    step    from one call of a communicator to the rank's next one

Messages name their source, so it does not matter who posts first: posts and waits commute. What
does not commute is what ranks share beside messages: Python objects, registered memory, and the
answer of `test()`, which a message changes. Whether a step has *changed* what is shared is seen by
comparing before and after. Whether it has read something is not seen, so each step may have, but
for those inside a call that knows no memory of the user's: a barrier, for instance.
"""

from __future__ import annotations

import math
import pickle
import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from minidist.comm.communicator import Communicator
from minidist.comm.threads_wire.carriers.carrier import Carrier
from minidist.comm.threads_wire.cluster import Cluster
from minidist.comm.threads_wire.group import RollCall
from minidist.comm.threads_wire.lanes import Event, Lane, Operation
from minidist.comm.threads_wire.world import World

Key = tuple[str, int, int, int]  # of messages: communicator, sender, receiver, tag


@dataclass
class Step:
    """One step of a task, a rank or one of its streams."""

    task: str
    changed: bool = False  # something that ranks share
    apart: bool = False  # it cannot have read that: it was all inside of a barrier, say
    polled: set[Key] = field(default_factory=set)  # messages whose arrival it has asked for
    posted: set[Key] = field(default_factory=set)  # messages that it has posted an end of
    after: set[int] = field(default_factory=set)  # steps that it had to wait for

    def depends_on(self, other: Step) -> bool:
        """Tell whether the two might give other values in the other order."""
        if self.task == other.task:
            return True
        if (self.changed and not other.apart) or (other.changed and not self.apart):
            return True
        asked = self.polled & other.posted or other.polled & self.posted
        return bool(asked)


# calls that are given no memory
APART = frozenset(
    call.__code__
    for call in (
        Communicator.barrier,
        Communicator.split,
        Communicator.fork,
        Communicator.levels,
        Communicator.allocate,
        Communicator.roll_call,
    )
)


class WatchedWorld(World):
    """A world that notes what each step touches.

    Attributes
    ----------
    steps : list[Step]
        What was done so far, in order. The last one is under way.
    """

    patience = 1  # whoever has heard "not yet" once hears it again when nobody else can go on

    def __init__(
        self, ranks: int, cluster: Cluster | None, eager_limit: int, carrier: Carrier, shared: Any
    ) -> None:
        super().__init__(ranks, cluster, eager_limit, math.inf, carrier)
        self.steps: list[Step] = []
        self.watched: list[Any] = [] if shared is None else [shared]
        self.looked = self._look()
        self.posted: dict[int, tuple[Operation, set[int]]] = {}  # the steps that made it complete
        self.called: dict[int, tuple[RollCall, set[int]]] = {}
        self.calls: dict[str, FrameType | None] = {}  # by task: what its last step ended in

    def begin(self, task: str) -> None:
        """Note that the step under way is over, and that `task` begins another one."""
        self.steps.append(Step(task))

    def end(self) -> None:
        """Note whether the step under way has changed what ranks share."""
        looked = self._look()
        if self.steps:
            step = self.steps[-1]
            step.changed |= looked != self.looked
            call = _call()
            before, self.calls[step.task] = self.calls.get(step.task), call
            step.apart = call is not None and call is before and not step.changed
        self.looked = looked

    def _look(self) -> list[bytes]:
        return [pickle.dumps(one) for one in self.watched]

    @property
    def now(self) -> int:
        """The number of the step under way."""
        return len(self.steps) - 1

    def expose(self, memory: Any) -> None:
        """Watch memory that other ranks can read."""
        self.watched.append(memory)
        self.looked.append(pickle.dumps(memory))

    def post(self, lane: Lane, kind: Any, array: Any, key: Key) -> Operation:
        """Post one end of a message, and note the step."""
        operation = super().post(lane, kind, array, key)
        self.steps[-1].posted.add(key)
        self.posted.setdefault(id(operation), (operation, set()))[1].add(self.now)
        return operation

    def _meet(self, send: Operation, receive: Operation) -> None:
        super()._meet(send, receive)
        causes = {self.now}
        for end in (send, receive):
            causes |= self.posted.get(id(end), (end, set()))[1]
        for end in (send, receive):
            self.posted[id(end)] = end, causes

    def wait(self, lane: Lane, event: Event, idle: bool = False) -> None:
        """Wait, and note for which steps."""
        if isinstance(event, RollCall):
            self.called.setdefault(id(event), (event, set()))[1].add(self.now)
        before = self.now
        super().wait(lane, event, idle)
        if self.now == before or self.failure is not None:
            return
        if isinstance(event, Operation):
            self.steps[-1].after |= self.posted[id(event)][1]
        elif isinstance(event, RollCall):
            self.steps[-1].after |= self.called[id(event)][1]

    def poll(self, operation: Operation) -> bool:
        """Ask for a message, and note that the step has."""
        answer = super().poll(operation)
        if self.failure is None:
            self.steps[-1].polled.add(operation.key)
        return answer


def _call() -> FrameType | None:
    """Return the call of the innermost kind of `APART` that the running rank is in, if any."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code not in APART:
        frame = frame.f_back
    return frame
