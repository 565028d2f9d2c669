"""A pipeline schedule is data: the list of actions of every rank, in the order in which the rank
does them.

    rank 0    0F0 0F1 0B0 0B1        2F0: stage 2, forward, microbatch 0
    rank 1    1F0 1B0 1F1 1B1

The executor, the checker, the simulator and the drawing all read this one list. A schedule names
only what is computed; a pass adds the sends, the receives and the reductions over the data axis
(`communicate.py`). `read_plan` reads text in this form, so you can write a schedule of your own
into a file. It reads torch's CSV, too, in which a rank's actions are separated by commas, and an
empty place is a moment in which the rank idles: `schedule._dump_csv(file, "compute_only")`.
`Plan.csv` writes it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import count
from typing import NamedTuple

from minidist.full.pipeline.errors import ScheduleError


class Kind(StrEnum):
    """What an action does, and how a plan writes it."""

    FORWARD = "F"
    BACKWARD = "B"  # whole, or in its place the two halves:
    INPUTS = "I"  # the gradient of the inputs, which the stage before waits for,
    WEIGHTS = "W"  # and the gradients of the weights, which nobody waits for
    SEND_OUTPUT = "SEND_F"
    RECEIVE_OUTPUT = "RECV_F"
    SEND_GRADIENT = "SEND_B"
    RECEIVE_GRADIENT = "RECV_B"
    REDUCE = "R"  # sum the gradients of a stage over the data axis
    UPDATE = "U"  # step the optimizer of a stage, in a plan of many batches
    OFFLOAD = "OFF"  # let the weights of a stage that waits leave for host memory
    FETCH = "FETCH"  # bring them back


class Flow(NamedTuple):
    """What goes from one stage to another."""

    content: Kind  # the action that makes it
    send: Kind
    receive: Kind
    step: int  # how many stages further it goes


OUTPUTS = Flow(Kind.FORWARD, Kind.SEND_OUTPUT, Kind.RECEIVE_OUTPUT, 1)
GRADIENTS = Flow(Kind.BACKWARD, Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT, -1)
FLOWS = {kind: flow for flow in (OUTPUTS, GRADIENTS) for kind in flow[:3]} | {
    Kind.INPUTS: GRADIENTS
}
ENDS = frozenset(end for flow in FLOWS.values() for end in (flow.send, flow.receive))  # of messages
BACKWARDS = (Kind.BACKWARD, Kind.INPUTS, Kind.WEIGHTS)
COMPUTING = (Kind.FORWARD, *BACKWARDS)
TRANSFERS = (Kind.OFFLOAD, Kind.FETCH)

NUMBERED = "|".join((*FLOWS, Kind.WEIGHTS, Kind.UPDATE, *TRANSFERS))
WORD = re.compile(rf"(\d{{1,9}})(?:({Kind.REDUCE})|({NUMBERED})(\d{{1,9}}))")

OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")  # torch's: actions that it runs side by side
# and those that it adds to a plan before it runs
LOWERED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)")


class Action(NamedTuple):
    """One thing that a rank does.

    Attributes
    ----------
    kind : Kind
        What it does.
    stage : int
        For a message, the stage that sends or receives it: `SEND_F` of stage 0 meets `RECV_F` of
        stage 1.
    microbatch : int
        Counted from 0. A reduction covers all microbatches: its number is 0, and is not written.
        An update has the number of the last microbatch whose gradient it uses.
        `OFF` and `FETCH` have none either: they count how often the stage has left before.
    """

    kind: Kind
    stage: int
    microbatch: int = 0

    def __str__(self) -> str:
        if self.kind == Kind.REDUCE:
            return f"{self.stage}{self.kind}"
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def communicates(self) -> bool:
        """Whether this is one end of a message."""
        return self.kind in ENDS

    @property
    def neighbour(self) -> int:
        """The stage to which this action's result or message goes, or from which it comes.

        It may not exist.

        Raises KeyError for what passes nothing on: `W`, `R`, `U`, `OFF` and `FETCH`.
        """
        flow = FLOWS[self.kind]
        return self.stage + (-flow.step if self.kind == flow.receive else flow.step)

    @property
    def key(self) -> Action:
        """What others name when they wait for this action: `B`, too, if it is an `I`, which gives
        them the same.
        """
        if self.kind is not Kind.INPUTS:
            return self
        return Action(Kind.BACKWARD, self.stage, self.microbatch)


@dataclass(frozen=True)
class Plan:
    """The actions of every rank for one step.

    Attributes
    ----------
    name : str
        A label; plans that differ in it alone are equal.
    ranks, stages, microbatches : int
        How many of each.
    rank_of : tuple of int
        The rank that holds each stage.
    actions : tuple of tuples of Action
        For each rank, in its order.
    batch : int
        Microbatches whose gradients an update uses, in a plan that has updates; otherwise 0: the
        plan is one step, and the update comes after it.

    Raises
    ------
    ValueError
        If the lengths of `rank_of` and `actions` are not `stages` and `ranks`.
    """

    name: str = field(compare=False)
    ranks: int
    stages: int
    microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    batch: int = 0

    def __post_init__(self) -> None:
        if len(self.rank_of) != self.stages or len(self.actions) != self.ranks:
            given = (
                f"the ranks of {len(self.rank_of)} stages and the actions of {len(self.actions)} "
                "ranks"
            )
            raise ValueError(
                f"a plan of {self.stages} stages on {self.ranks} ranks was given {given}"
            )

    @cached_property
    def communicates(self) -> bool:
        """Whether sends and receives have been added."""
        return any(action.communicates for row in self.actions for action in row)

    @cached_property
    def reduces(self) -> bool:
        """Whether gradients are reduced over the data axis."""
        return any(action.kind == Kind.REDUCE for row in self.actions for action in row)

    @cached_property
    def offloads(self) -> bool:
        """Whether weights of stages that wait leave for host memory."""
        return any(action.kind == Kind.OFFLOAD for row in self.actions for action in row)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank holds, in order: its chunks."""
        return [stage for stage, holder in enumerate(self.rank_of) if holder == rank]

    def message(self, action: Action) -> tuple[Action, ...]:
        """Return the send and the receive that pass an action's result on, or nothing if it stays
        on its rank.
        """
        if (
            action.kind not in FLOWS
            or action.communicates
            or not 0 <= action.neighbour < self.stages
        ):
            return ()
        if self.rank_of[action.stage] == self.rank_of[action.neighbour]:
            return ()
        flow = FLOWS[action.kind]
        return action._replace(kind=flow.send), Action(
            flow.receive, action.neighbour, action.microbatch
        )

    def compute_only(self) -> Plan:
        """Return the plan without its sends and receives."""
        rows = (tuple(action for action in row if not action.communicates) for row in self.actions)
        return replace(self, actions=tuple(rows))

    def text(self) -> str:
        """Return the plan as text, one line for each rank; `read_plan` reads it back."""
        return "".join(" ".join(map(str, row)) + "\n" for row in self.actions)

    def csv(self) -> str:
        """Return the plan as the CSV that torch's runtime loads, `_load_csv(file, "compute_only")`,
        and `read_plan` reads back. Messages and reductions are left out: torch adds its own.

        Raises
        ------
        ScheduleError
            If the plan has updates or offloads, for which torch has no word.
        """
        for rank, row in enumerate(self.actions):
            for position, action in enumerate(row):
                if action.kind in (Kind.UPDATE, *TRANSFERS):
                    raise ScheduleError(
                        f"torch's plans have no action like {action}: write text() instead",
                        self.actions,
                        [(rank, position)],
                    )
        rows = ([each for each in row if each.kind in COMPUTING] for row in self.actions)
        return "".join((",".join(map(str, row)) or ",") + "\n" for row in rows)


def read_plan(text: str, name: str = "text") -> Plan:
    """Read a plan: line r has the actions of rank r, `0F0 0F1 0B0 0B1`; blank lines and `#
    comments` are skipped.

    Commas separate actions as well as spaces do. A stage belongs to the rank on whose line it comes
    first. Only the words are checked here: call `check` next. Actions that torch would run side by
    side, `(0F3;3B1)OVERLAP_F_B`, come one after the other.

    Raises
    ------
    ScheduleError
        If the text has no action, has a word that is no action, or leaves out a stage.
    """
    lines = [OVERLAPPED.sub(r"\1", line.partition("#")[0]) for line in text.splitlines()]
    # A line of commas alone is a rank that does nothing.
    rows = [re.split(r"[\s,;]+", line.strip(" \t,")) for line in lines if line.strip()]
    rows = [[word for word in row if word] for row in rows]
    found: list[list[Action]] = [[] for _ in rows]
    holders: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for position, word in enumerate(row):
            match = WORD.fullmatch(word)
            if LOWERED.fullmatch(word):
                added = (
                    f"rank {rank}, word {position + 1}: {word} is added to a plan before it runs"
                )
                fix = 'leave it out, or write the plan by _dump_csv(file, "compute_only")'
                raise ScheduleError(f"{added}: {fix}", rows, [(rank, position)])
            if match is None:
                sentence = (
                    f"rank {rank}, word {position + 1}: {word[:20]!r} is no action: write stage, "
                    "kind and microbatch, as in 2F0; a kind is F (forward), B (backward), or in "
                    "its place I (for inputs) and W (for weights)"
                )
                raise ScheduleError(sentence, rows, [(rank, position)])
            found[rank].append(
                Action(Kind(match[2] or match[3]), int(match[1]), int(match[4] or 0))
            )
            holders.setdefault(int(match[1]), rank)
    if not holders:
        raise ScheduleError(
            "the text holds no action: write one line for each rank, such as 0F0 0B0", [], []
        )
    gap = next(stage for stage in count() if stage not in holders)
    if gap <= max(holders):
        raise ScheduleError(
            f"no rank holds stage {gap}, but stage {max(holders)} is there", rows, []
        )
    microbatches = 1 + max(
        (each.microbatch for row in found for each in row if each.kind not in TRANSFERS), default=0
    )
    rank_of = tuple(holders[stage] for stage in range(gap))
    return Plan(name, len(rows), gap, microbatches, rank_of, tuple(map(tuple, found)))
