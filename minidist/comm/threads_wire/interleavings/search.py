"""Which interleavings are still to be tried: dynamic partial-order reduction with sleep sets.

    run 1      0 0 0 1 1 2 2        two steps of other ranks touch the same, and nothing orders them:
    run 2      0 0 1 ...            so the second one's rank is tried in place of the first one

A run is a sequence of steps. Two runs that differ only in the order of steps that do not depend on
each other give the same, and one of them is enough. After each run, the search looks for pairs of
steps that do depend on each other, and of which no third one makes the second wait for the first:
there the other order is worth a run (Flanagan & Godefroid, "Dynamic partial-order reduction for
model checking software", POPL 2005). A rank whose step was tried at a place *sleeps* in the runs
that try another rank's there, until a step comes that its own depends on (Godefroid, "Partial-Order
Methods for the Verification of Concurrent Systems", 1996, chapter 5): what its step would lead to
has been seen.
"""

from __future__ import annotations

from collections.abc import Sequence

from minidist.comm.threads_wire.carriers.order import Named
from minidist.comm.threads_wire.interleavings.watched import Step, WatchedWorld


class Redundant(Exception):
    """This run would only repeat what another one has shown."""


class Place:
    """A moment of a run at which one of several tasks goes on.

    Attributes
    ----------
    able : list[str]
        Those who may.
    chosen : str
        The one that does, in this run.
    wanted : set[str]
        Those that are worth a run.
    tried : dict[str, Step]
        Those that have had one, and the step that each took here.
    asleep : dict[str, Step]
        Those whose step here was seen in another run, before it came here.
    """

    def __init__(self, able: list[str], asleep: dict[str, Step]) -> None:
        self.able, self.asleep = able, asleep
        self.chosen = ""
        self.wanted: set[str] = set()
        self.tried: dict[str, Step] = {}

    def left(self) -> list[str]:
        """Return who is worth a run and has had none."""
        open_ = self.wanted - self.tried.keys() - self.asleep.keys()
        return [name for name in self.able if name in open_]


class Search:
    """The runs of one program, one after the other.

    Attributes
    ----------
    places : list[Place]
        Those of the run under way, or of the last one.
    """

    def __init__(self, reduce: bool) -> None:
        self.reduce = reduce
        self.places: list[Place] = []
        self.world: WatchedWorld | None = None
        self.depth = 0

    def begin(self, world: WatchedWorld) -> None:
        """Begin another run, in a world of its own."""
        self.world, self.depth = world, 0

    def choose(self, ready: Sequence[Named]) -> int:
        """Return who goes on: as the places say that are there, and then whoever did before.

        Raises
        ------
        Redundant
            If all who may go on are asleep.
        """
        world = self.world
        assert world is not None
        if world.failure is not None:
            return 0
        names = [task.name for task in ready]
        world.end()
        if self.depth == len(self.places):
            self._reach(names, world.steps)
        place = self.places[self.depth]
        if sorted(place.able) != sorted(names):
            raise RuntimeError(
                f"the program does not repeat itself: at step {self.depth} {', '.join(names)} can "
                f"go on, where it was {', '.join(place.able)} before. Let it depend on nothing but "
                "its ranks: no clock, no unseeded random numbers, no state left by an earlier run "
                "(shared= makes what ranks share anew for each)"
            )
        self.depth += 1
        world.begin(place.chosen)
        return names.index(place.chosen)

    def _reach(self, names: list[str], steps: list[Step]) -> None:
        """Add a place that no run has come to."""
        asleep: dict[str, Step] = {}
        if self.places and self.reduce:
            last, step = self.places[-1], steps[-1]
            before = last.asleep | {
                name: tried for name, tried in last.tried.items() if name != last.chosen
            }
            asleep = {name: one for name, one in before.items() if not one.depends_on(step)}
        place = Place(names, asleep)
        awake = [name for name in names if name not in asleep]
        if not awake:
            raise Redundant
        before_ = steps[-1].task if steps else ""
        place.chosen = before_ if before_ in awake else min(awake, key=number)
        place.wanted = {place.chosen} if self.reduce else set(names)
        self.places.append(place)

    def advance(self) -> bool:
        """Learn from the run that has ended, and turn to the next; return False if there is none."""
        assert self.world is not None
        self.world.end()
        steps = self.world.steps
        del self.places[len(steps) :]
        for place, step in zip(self.places, steps, strict=True):
            place.tried[place.chosen] = step
        if self.reduce:
            self._want(steps)
        while self.places and not self.places[-1].left():
            self.places.pop()
        if not self.places:
            return False
        self.places[-1].chosen = self.places[-1].left()[0]
        return True

    def _want(self, steps: list[Step]) -> None:
        """Note at which places another task is worth a run."""
        clocks: list[set[int]] = []  # for each step, those that come before it in any such run
        latest: dict[str, set[int]] = {}
        for number_, step in enumerate(steps):
            before = set(latest.get(step.task, ()))
            for cause in step.after:
                before |= clocks[cause] | {cause}
            for earlier in range(number_ - 1, -1, -1):
                other = steps[earlier]
                if other.task != step.task and earlier not in before and step.depends_on(other):
                    self._swap(earlier, step.task, before, steps)
                    break
            for earlier in range(number_):
                if earlier not in before and steps[earlier].depends_on(step):
                    before |= clocks[earlier] | {earlier}
            clocks.append(before)
            latest[step.task] = before | {number_}

    def _swap(self, earlier: int, task: str, before: set[int], steps: list[Step]) -> None:
        """Want a run in which `task`, or what it waits for, goes on at the place of a step."""
        place = self.places[earlier]
        leading = {steps[number_].task for number_ in before if number_ > earlier}
        if task in place.able:
            place.wanted.add(task)
        elif useful := [name for name in place.able if name in leading]:
            place.wanted.add(useful[0])
        else:
            place.wanted.update(place.able)


def number(name: str) -> tuple[int, str]:
    """Order names as ranks are: `rank 10` comes after `rank 2`."""
    return int(name.split()[1]), name
