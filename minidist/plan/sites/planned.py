"""Sites of one planned layout each: every way to train on all of them, and which one wins."""

from dataclasses import dataclass, replace
from functools import cached_property

from minidist.plan.failures.policies import Job, closed_form
from minidist.plan.search import Found
from minidist.plan.sites.stops import LEAST, trains
from minidist.plan.sites.ways import Joined, Wire, best, join

POINTS, DECADES = 120, 3  # of a line over bandwidths, and how far it goes on each side of the wire


@dataclass(frozen=True)
class PlannedSites:
    """Sites that have a layout each, and the wire between them.

    `job` is one site as failures see it, and `policy` how it goes on; "": nothing fails.
    """

    found: Found
    wire: Wire
    job: Job
    policy: str = ""

    @cached_property
    def ways(self) -> dict[str, Joined]:
        """What each way makes of the wire, by its name."""
        ways = join(self.found, self.wire)
        if not self.policy:
            return ways
        return {
            name: way._replace(trains=trains(way, self.job, self.policy, self.wire.sites))
            for name, way in ways.items()
        }

    @cached_property
    def alone(self) -> float:
        """Seconds of a step that counts, in a site that trains alone."""
        share = closed_form(self.job, self.policy) if self.policy else 1.0
        return self.found.seconds / max(LEAST, share)

    @cached_property
    def wins(self) -> str:
        """The way to take; nothing if one site alone is faster than all of them."""
        return best(self.ways, self.alone, self.wire.sites)

    @property
    def tokens(self) -> int:
        """Tokens of a step of all sites."""
        return self.wire.sites * self.found.run.batch * self.found.run.sequence

    def at(self, bandwidth: float) -> "PlannedSites":
        """Return the same sites with so many bytes/s between them."""
        return replace(self, wire=self.wire._replace(bandwidth=bandwidth))

    def by_bandwidth(self) -> tuple[list[float], dict[str, list[float]]]:
        """Return bandwidths in bytes/s, and the seconds of a step that counts at each, by way."""
        bandwidths = []
        for at in range(POINTS):
            decades = DECADES * (2 * at / (POINTS - 1) - 1)
            bandwidths.append(self.wire.bandwidth * 10**decades)
        joined = [self.at(bandwidth).ways for bandwidth in bandwidths]
        return bandwidths, {name: [ways[name].lasting for ways in joined] for name in self.ways}
