"""`explore(program, ranks=3)`: does the order in which ranks go on matter?

    found = minidist.comm.explore(program, ranks=3)
    print(found)         3 ranks, 12 interleavings: in one of them, no rank can go on. ...
    minidist.run(program, 3, engine="cooperative", schedule=found.schedule)        and here it is again

Every interleaving is tried in which one might differ: ranks take turns, and another one may go on
at each call of a communicator. What lies between two calls is one step. So a race is seen if
another rank's step fits between two accesses: where a program reads in one step and writes in
another. Where it does both between two calls, `comm.hand_over()` in their middle makes two steps.

Which steps matter is found by watching what ranks share: registered memory, and what `shared` makes.
Of what a program shares by other ways (a global, a closure) nothing is known; `reduce=False` tries
all interleavings instead, of which there are many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minidist.comm.agree import debug_mode
from minidist.comm.communicator import Communicator
from minidist.comm.errors import DeadlockError, whole
from minidist.comm.ledger import Ledger
from minidist.comm.threads_wire.carriers.engines import cooperative
from minidist.comm.threads_wire.cluster import Cluster
from minidist.comm.threads_wire.interleavings.same import same
from minidist.comm.threads_wire.interleavings.search import Redundant, Search
from minidist.comm.threads_wire.interleavings.watched import WatchedWorld
from minidist.comm.threads_wire.threads_wire import carry, check_arguments


@dataclass(frozen=True)
class Exploration:
    """What `explore` has found.

    Attributes
    ----------
    interleavings : int
        How many were tried to their end.
    redundant : int
        How many more were left in their middle, as they could only repeat others.
    complete : bool
        Whether all were tried that might differ.
    verdict : str
        `all alike`, `deadlock`, `error` or `other values`.
    schedule : tuple[str, ...]
        Who went on at each step of the interleaving found; of the first one if all are alike.
    first : tuple[str, ...]
        The same of the first interleaving, which gave the values that the others are compared with.
    error : BaseException or None
        What the interleaving found raised.
    values, expected : list
        What its ranks returned, and what they returned in the first one.
    """

    ranks: int
    interleavings: int
    redundant: int
    complete: bool
    verdict: str
    schedule: tuple[str, ...]
    first: tuple[str, ...]
    error: BaseException | None = None
    values: Any = None
    expected: Any = None

    def __str__(self) -> str:
        tried = f"{self.ranks} ranks, {self.interleavings} interleavings"
        if self.verdict == "all alike":
            rest = "that is all" if self.complete else "there are more: raise most="
            return f"{tried}: all alike, and {rest}"
        steps = " ".join(name.removeprefix("rank ") for name in self.schedule)
        if self.verdict == "other values":
            said = f"{self.values} in place of {self.expected}"
        else:
            said = f"{type(self.error).__name__}: {self.error}"
        return f"{tried}: in the last one, {said}\nranks went on in this order: {steps}"


def explore(
    program: Callable[..., Any],
    ranks: int,
    *,
    shared: Callable[[], Any] | None = None,
    cluster: Cluster | None = None,
    eager_limit: int = 0,
    debug: bool | None = None,
    engine: str | None = None,
    reduce: bool = True,
    most: int = 10_000,
) -> Exploration:
    """Try all interleavings of a small program in which something might differ, up to the first
    that deadlocks, raises, or gives other values than the first one.

    Parameters
    ----------
    shared : callable, optional
        Makes what the ranks share, anew for each interleaving: the program is then called as
        `program(comm, what it made)`. It must be possible to pickle it: so changes are seen.
    engine : str, optional
        One on which ranks take turns: `cooperative`, the default, or `greenlets`; see `run`.
    reduce : bool
        Leave out interleavings that cannot differ. False tries all.
    most : int
        Give up after so many interleavings.
    cluster, eager_limit, debug
        As for `run`.

    Raises
    ------
    ValueError, TypeError
        For numbers and clusters that cannot be, as `run`.
    RuntimeError
        If the program does not do the same again in the same interleaving.
    """
    ranks, most = check_arguments(ranks, cluster, eager_limit), whole("most", most, least=1)
    search, interleavings, redundant = Search(reduce), 0, 0
    first: tuple[Any, tuple[str, ...]] | None = None
    while True:
        state = shared() if shared is not None else None
        carrier = cooperative(engine, search.choose, fine=True)
        world = WatchedWorld(ranks, cluster, eager_limit, carrier, state)
        search.begin(world)
        ran = _once(program, world, shared is not None, state, debug)
        redundant += isinstance(ran, Redundant)
        interleavings += not isinstance(ran, Redundant)
        schedule = tuple(step.task for step in world.steps)
        if first is None:
            first = ran, schedule
        verdict = _verdict(ran, first[0])
        more = verdict == "all alike" and search.advance()
        if not more or interleavings + redundant >= most:
            break
    found = verdict != "all alike"
    return Exploration(
        ranks,
        interleavings,
        redundant,
        complete=not more and not found,
        verdict=verdict,
        schedule=schedule if found else first[1],
        first=first[1],
        error=ran if found and isinstance(ran, BaseException) else None,
        values=None if isinstance(ran, BaseException) else ran,
        expected=None if isinstance(first[0], BaseException) else first[0],
    )


def _once(
    program: Callable[..., Any], world: WatchedWorld, shares: bool, state: Any, debug: bool | None
) -> Any:
    """Run the program once; return what the ranks did, or what went wrong."""

    def called(comm: Communicator) -> Any:
        return program(comm, state) if shares else program(comm)

    try:
        return carry(called, world, lambda: Ledger(None, debug_mode(debug)))
    except RuntimeError as error:
        if world.failure == (-1, error):
            raise  # the search's own
        return error
    except Exception as error:
        return error


def _verdict(ran: Any, first: Any) -> str:
    if isinstance(ran, Redundant):
        return "all alike"
    if isinstance(ran, DeadlockError):
        return "deadlock"
    if isinstance(ran, BaseException):
        return "error"
    return "all alike" if same(ran, first) else "other values"
