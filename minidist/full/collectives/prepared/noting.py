"""A communicator that notes what a collective does, so that it can be done again.

    all_reduce(buffer, noting)    checks, chooses, allocates, and here sends nothing
    what is noted                 exchange │ add │ exchange │ add
    handle()                      exchange ─▶ add ─▶ exchange ─▶ add

This is possible because no collective looks at what a buffer holds, or asks what has come already:
what it does depends on sizes, ranks and wires alone. CUDA graphs capture a GPU's work in the same
way.

    computing(function), copy     what is computed, on which arrays
    isend, irecv, exchange        messages that are checked, to be counted and traced when they are sent
    fence, reach                  in shared memory
    carry_out                     the collective as a whole, with its span

A roll call and an allocation are no steps: they happen at once, and only once.
"""

from collections.abc import Callable
from functools import cached_property, partial, wraps
from typing import Any, TypeAlias

import numpy as np

from minidist.comm import Buffer
from minidist.full.collectives.shared import Staging
from minidist.full.comm.buffers import Array, copy
from minidist.full.comm.communicator import Communicator, Computing, Levels
from minidist.full.comm.ledger import Traffic
from minidist.full.comm.request import Pending, awaited_exchange, exchange, post
from minidist.full.trace.events import RECEIVE, SEND

Step: TypeAlias = Callable[[], object]


class Notes:
    """What has been noted.

    Attributes
    ----------
    steps : list[Step]
        In their order.
    sent : dict
        Messages and bytes that the steps send, by where they count: they are counted in one go.
    algorithm : str
        The one that was chosen; empty if there was nothing to do.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.sent: dict[int, tuple[Traffic, list[int]]] = {}
        self.algorithm = ""

    def count(self, traffic: Traffic, messages: int, bytes: int) -> None:
        """Note what a step sends."""
        _, total = self.sent.setdefault(id(traffic), (traffic, [0, 0]))
        total[0] += messages
        total[1] += bytes

    def of(self, work: Callable[..., object], *arguments: Any) -> list[Step]:
        """Return what `work(*arguments)` does, in a list of its own."""
        steps, sent = self.steps, self.sent
        self.steps = []
        self.sent = {}
        work(*arguments)
        inner = self.take()
        self.steps = steps
        self.sent = sent
        return inner

    def take(self) -> list[Step]:
        """Return all steps, and forget them."""
        counting: list[Step] = [partial(each.sent, *total) for each, total in self.sent.values()]
        found = counting + self.steps
        self.steps = []
        self.sent = {}
        return found


class Noting(Communicator):
    """`comm`, but for what is noted."""

    def __init__(self, comm: Communicator, notes: Notes) -> None:
        super().__init__(comm.wire, comm.ledger)
        self.comm, self.notes = comm, notes
        self.kept = comm.kept
        self.registered = comm.registered
        self.tag_offset = comm.tag_offset

    @cached_property
    def internal(self) -> Communicator:
        return self if self.tag_offset else Noting(self.comm.internal, self.notes)

    def node_levels(self) -> Levels:
        inside, across = self.comm.node_levels()
        return Levels(
            Noting(inside, self.notes),
            Noting(across, self.notes),
        )

    # ---------------------------------------------------------------- what is noted

    def computing(self, function: Computing) -> Computing:
        @wraps(function)
        def noted(*arguments: Any) -> None:
            self.notes.steps.append(partial(function, *arguments))

        return noted  # type: ignore[return-value]

    def copy(self, target: Array, source: Array) -> None:
        step = partial(copy, target, source)
        # Here it is known how to copy, which `copy` asks each time.
        if isinstance(target, np.ndarray) and target.dtype is source.dtype:
            step = partial(target.__setitem__, ..., source)
        self.notes.steps.append(step)

    def isend(self, buffer: Buffer, to: int, tag: int = 0) -> "Message":  # type: ignore[override]
        array = self._checked(buffer, to, tag, "to")
        self.notes.count(self.ledger.traffic, 1, array.nbytes)
        message = self.wire.isend, SEND, array, to, tag
        return Message(self.notes, partial(post, self.comm, *message))

    def irecv(self, buffer: Buffer, source: int, tag: int = 0) -> "Message":  # type: ignore[override]
        array = self._checked(buffer, source, tag, "source")
        message = self.wire.irecv, RECEIVE, array, source, tag
        return Message(self.notes, partial(post, self.comm, *message))

    def exchange(self, out: Buffer, to: int, into: Buffer, source: int, tag: int = 0) -> None:
        leaving, arriving = self._checked_exchange(out, to, into, source, tag)
        self.notes.count(self.ledger.traffic, 1, leaving.nbytes)
        message = leaving, to, arriving, source
        whole_tag = tag + self.tag_offset
        carry = self.wire.prepare_exchange(*message, whole_tag)
        awaited = awaited_exchange(self, arriving, source, tag)
        step = partial(exchange, self.comm, carry, awaited, *message, tag)
        self.notes.steps.append(step)

    def fence(self, bytes: int = 0) -> None:
        self.notes.steps.append(partial(self.comm.fence, bytes))

    def reach(self, bytes: int, peer: int) -> None:
        self.notes.count(self.ledger.traffic, 0, bytes)
        if self.wire.one_process:  # on real wires it takes its own time
            self.notes.steps.append(partial(self.wire.reach, bytes, peer))

    def carry_out(
        self,
        what: str,
        algorithm: str,
        bytes: int,
        engine_bytes: int | None,
        work: Callable[..., None],
        arguments: tuple[Any, ...],
    ) -> None:
        self.notes.algorithm = algorithm
        if engine_bytes is None:
            again = self._noted(partial(work, *arguments))
        else:
            again = self.wire.prepare_native(what, work, arguments)
        call = what, algorithm, bytes, engine_bytes, again, ()
        self.notes.steps.append(partial(self.comm.carry_out, *call))

    def _noted(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return what does again what `work` does now.

        If that writes into a half of shared memory, it is noted for each half: which is free when
        it is done again depends on what else is done meanwhile.
        """
        before = self.kept.get(Staging)
        turns = before.turns if before else 0
        steps = self.notes.of(work)
        staging = self.kept.get(Staging)
        if staging is None or staging.turns == turns:
            return partial(play, steps)
        turned = staging.turns - turns
        of_half = {turns % 2: steps}
        # Now the other half, from the turn after.
        other = turns + 1
        staging.turns = other
        of_half[other % 2] = self.notes.of(work)
        staging.turns = turns
        return partial(play_in_halves, staging, turned, of_half)


class Message:
    """A message that is noted: each call of the handle posts it, and waits for it, anew."""

    def __init__(self, notes: Notes, start: Callable[[], Pending]) -> None:
        self.notes, self.start = notes, start
        self.pending: Pending | None = None
        notes.steps.append(self._post)

    def wait(self) -> None:
        """Note that it is waited for here."""
        self.notes.steps.append(self._wait)

    def test(self) -> bool:
        """Refuse: the next answer may be another one."""
        raise TypeError("a collective that asks whether a message has come cannot be prepared")

    def _post(self) -> None:
        self.pending = self.start()

    def _wait(self) -> None:
        assert self.pending is not None, "it was posted before"
        self.pending.wait()
        self.pending = None


def play(steps: list[Step]) -> None:
    """Do what was noted."""
    for step in steps:
        step()


def play_in_halves(staging: Staging, turns: int, of_half: dict[int, list[Step]]) -> None:
    """Do what was noted for the half of shared memory whose turn it is."""
    steps = of_half[staging.turns % 2]
    staging.turns += turns
    play(steps)
