"""Of the runs that were published, and so did fit: how many the planner would refuse, because they
need more than their GPUs have, and what would explain it.

A row may not say that activations of some layers went to the host's memory, or that some were
computed again. So the report names the first of these under which a run fits:

    inferred     the row says itself that its microbatch or what it computed again was not published
    beside       its tensors alone fit: what a driver sees beside them is an estimate, and an allocator without room
                 gives back what it only keeps for later
    parts        norms, the activation and up-projections of latent channels are computed again (Megatron Core's
                 recompute_modules, which NVIDIA's recipes for experts set)
    host         activations of some layers are in the host's memory (cpu_offloading_num_layers of NVIDIA's recipes for
                 FSDP; "offload" of MaxText's for TPU v6e)
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from minidist.plan.device import Constants
from minidist.plan.memory import GB, bytes_held
from minidist.plan.published.fields import LeftOut, PublishedRow
from minidist.plan.published.machines import text
from minidist.plan.published.rows import setup
from minidist.plan.run import Setup


class Room(NamedTuple):
    """GB that a run is predicted to need of each GPU, and GB that one has."""

    id: str
    needs: float
    has: float
    why: str = ""

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
            why = "" if needs <= has else explanation(row, run)
            found.append(Room(str(row["id"]), needs / GB, has / GB, why))
    return found


def inferred(row: PublishedRow) -> str:
    """Return which fields that memory is in proportion to a row does not have from its source; nothing
    if none.
    """
    config = row.get("config")
    said = text(config, "inferred") if isinstance(config, dict) else ""
    return " and ".join(name for name in ("micro_batch", "recompute") if name in said)


def explanation(row: PublishedRow, run: Setup) -> str:
    """Return under which setting that its row does not tell a run would fit."""
    if fields := inferred(row):
        verb = "were" if " and " in fields else "was"
        return f"its {fields} {verb} not published"
    has = run.machine.device.memory
    held = bytes_held(run)
    if sum(held.values()) - held["resident"] <= has:
        return "its tensors alone fit"
    if run.recompute == "none" and run.software.engine:
        with_parts = bytes_held(replace(run, recompute="parts"))
        if sum(with_parts.values()) <= has:
            return "it fits if it computes norms and activations again"
    if sum(held.values()) - has <= held["activations"]:
        return "it fits with activations of some layers in the host's memory"
    return "nothing that is known explains it"


def refused(rows: Sequence[PublishedRow], known: Constants) -> dict[str, Any]:
    """Return how many runs there are, and those that the planner would refuse."""
    found = rooms(rows, known)
    return {
        "ran": len(found),
        "refused": [each._asdict() for each in found if not each.fits],
    }
