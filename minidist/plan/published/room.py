"""Of the runs that were published, and so did fit: how many the planner would refuse, because they
need more than their GPUs have.

Some of them needed less than what is written of them: a row may not say that activations of some
layers went to the host's memory, or that some were computed again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from minidist.plan.device import Constants
from minidist.plan.memory import GB, bytes_held
from minidist.plan.published.fields import LeftOut, PublishedRow
from minidist.plan.published.rows import setup


class Room(NamedTuple):
    """GB that a run is predicted to need of each GPU, and GB that one has."""

    id: str
    needs: float
    has: float

    @property
    def fits(self) -> bool:
        """Whether the planner would offer the run."""
        return self.needs <= self.has


def rooms(rows: Sequence[PublishedRow], known: Constants) -> list[Room]:
    """Return the room of each published run that ran and can be predicted."""
    found = []
    for row in rows:
        try:
            run = setup(row, known)
        except LeftOut:
            continue
        if row.get("kind") == "throughput" and not row["measured"].get("oom"):
            needs = sum(bytes_held(run).values())
            has = run.machine.device.memory
            found.append(Room(str(row["id"]), needs / GB, has / GB))
    return found


def refused(rows: Sequence[PublishedRow], known: Constants) -> dict[str, Any]:
    """Return how many runs there are, and those that the planner would refuse."""
    found = rooms(rows, known)
    return {
        "ran": len(found),
        "refused": [each._asdict() for each in found if not each.fits],
    }
