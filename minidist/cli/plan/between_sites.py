"""What `plan --sites` prints: a table of ways to train on several sites, and which of them wins.

With --policy or --mtbf, days count what failures take; so they do in the picture.
"""

from typing import Any

from minidist.draw.plan import draw_sites
from minidist.draw.table import aligned
from minidist.plan.cost import DAY, HOUR
from minidist.plan.failures.policies import POLICIES
from minidist.plan.memory import GB
from minidist.plan.sites.planned import PlannedSites
from minidist.plan.sites.stops import trains
from minidist.plan.sites.ways import WAYS, as_good_as_free


def sites_text(sites: PlannedSites, tokens: float) -> str:
    """Return the table of a run on so many tokens, and what it says."""
    title = (
        f"{sites.wire.sites} sites, {8 * sites.wire.bandwidth / GB:,.3g} Gbit/s between them",
        "a meeting sends",
        "every",
        "step",
        "tokens/s",
        *(["trains"] if sites.policy else []),
        "days",
        "as good as free from",
    )
    rows = []
    for name, way in sites.ways.items():
        rows.append(
            (
                f"  {name}",
                f"{way.bytes / GB:,.3g} GB",
                f"{way.every} step{'s' * (way.every > 1)}",
                f"{way.seconds:,.2f} s",
                f"{sites.tokens / way.seconds:,.0f}",
                *([f"{way.trains:.1%}"] if sites.policy else []),
                f"{tokens / sites.tokens * way.lasting / DAY:,.1f}",
                f"{8 * way.enough / GB:,.3g} Gbit/s",
            )
        )
    said = [aligned(title, rows), which_wins(sites, tokens), stopping(sites), left_out(sites)]
    return "\n".join(line for line in said if line)


def sites_picture(sites: PlannedSites, tokens: float, path: str, title: str) -> None:
    """Draw the days of each way by the bandwidth between the sites."""
    days = tokens / sites.tokens / DAY  # of a step of one second
    bandwidths, lines = sites.by_bandwidth()
    if sites.policy:
        hours = sites.job.mtbf / HOUR
        title += f"\na failure every {hours:,.1f} h in each site, policy {sites.policy}"
    draw_sites(
        gigabits=[8 * bandwidth / GB for bandwidth in bandwidths],
        days={name: [days * seconds for seconds in line] for name, line in lines.items()},
        alone=days * sites.wire.sites * sites.alone,
        there=(8 * sites.wire.bandwidth / GB, sites.wins or "one site alone"),
        path=path,
        title=f"{sites.wire.sites} sites, each {title}",
    )


def which_wins(sites: PlannedSites, tokens: float) -> str:
    """Say which way wins, and why."""
    days = tokens / sites.tokens * sites.wire.sites * sites.alone / DAY
    said = f"one site alone takes {sites.found.seconds:,.2f} s a step and {days:,.1f} days; "
    if not sites.wins:
        return said + "so do not join them: every way takes longer"
    free = as_good_as_free(sites.ways[sites.wins], sites.alone)
    why = "of what is as good as free, it changes the numbers least" if free else "the fastest"
    flags = WAYS[sites.wins].flags.format(sites=sites.wire.sites)
    return said + f"use {sites.wins}, `train {flags}`: {why}. ddp alone changes none"


def stopping(sites: PlannedSites) -> str:
    """Say whom a failure stops; nothing if nobody has asked."""
    if not sites.policy:
        return ""
    return (
        f"a failure every {sites.job.mtbf / HOUR:,.2f} h in each site, policy {sites.policy}: where "
        "sites meet in every step it holds up all of them, elsewhere one\n(assumed: see "
        "minidist/plan/sites/stops.py; `train` itself ends with any site)"
    )


def left_out(sites: PlannedSites) -> str:
    """Say which ways the layout does not go with; nothing if it goes with all."""
    left = [name for name in WAYS if name not in sites.ways]
    if not left:
        return ""
    return (
        f"{', '.join(left)}: not with zero={sites.found.run.zero}, which keeps no whole gradients"
    )


def sites_tree(sites: PlannedSites) -> dict[str, Any]:
    """Return the same for programs, with the share of the time that trains by policy."""
    ways = {}
    for name, way in sites.ways.items():
        shares = {policy: trains(way, sites.job, policy, sites.wire.sites) for policy in POLICIES}
        ways[name] = {**way._asdict(), "trains": shares}
    return {"ways": ways, "best": sites.wins}
