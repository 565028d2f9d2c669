"""Inside `sbatch` or `salloc`: ranks on several machines, started by srun; a machine that fails twice
is left out.

    #SBATCH --nodes=5 --ntasks-per-node=8                 one machine more than is needed
    python -m minidist launch -n 32 --max-restarts 3 -m minidist train ...

    start 0    n1 n2 n3 n4          ── a rank is lost on n2 ✗
    start 1    n1 n3 n4 n5          ── on the machine that was left over
    start 2    n1 n3 n4 n2          ── n5 has failed meanwhile; n2 has failed once
               n2 fails again: it is left out, with its name

srun says which machine a rank was lost on: `srun: error: n2: task 1: Killed`. Others may be named
before: a rank that misses its peer ends with an exit code. So who was killed is blamed first. Two
that are lost at once share a line, `n[2-3]: tasks 1-2: Killed`, and the blame.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from minidist.full.comm.errors import LaunchError
from minidist.full.launch.jobs import Outcome
from minidist.full.launch.restarts import FINAL, Restarts

TWICE = 2
# What srun says of the ranks that it ends itself, once one is lost.
ENDED = ("Terminated", "STEP")
LOST = re.compile(
    r"srun: error: (?:Node failure on )?([\w.\-\[\],]+?)(?:$|: tasks? [\d,\-]+: (.*))"
)


@dataclass
class Allocation:
    """The machines of a SLURM job, and how often each has failed.

    Attributes
    ----------
    nodes : list of str
    each : int
        Ranks of a machine.
    job : str
        SLURM's number of the job.
    """

    nodes: list[str]
    each: int
    job: str
    failures: Counter[str] = field(default_factory=Counter)
    blamed: list[str] = field(default_factory=list)  # in the last start
    certain: bool = False  # they were killed, or their machine has failed

    @property
    def fit(self) -> list[str]:
        """Machines that have failed less than twice, those that never have first."""
        left = [node for node in self.nodes if self.failures[node] < TWICE]
        return sorted(left, key=lambda node: self.failures[node])

    def command(self, nodes: list[str], ranks: int) -> list[str]:
        """Return the srun that starts so many ranks on some of the machines, up to their program."""
        return [
            "srun",
            f"--nodes={len(nodes)}",
            f"--nodelist={','.join(nodes)}",
            f"--ntasks={ranks}",
            f"--ntasks-per-node={self.each}",
            "--kill-on-bad-exit=1",
            sys.executable,
        ]

    def environment(self, nodes: list[str]) -> dict[str, str]:
        """Return where the ranks meet, unless it is said. Two jobs on a machine need different
        ports.
        """
        port = str(20_000 + int(self.job) % 10_000)
        told = os.environ
        return {
            "MASTER_ADDR": told.get("MASTER_ADDR", nodes[0]),
            "MASTER_PORT": told.get("MASTER_PORT", port),
        }

    def hear(self, line: str) -> None:
        """Note the machine that has lost a rank: the first that was killed, else the first named.

        Of several that end with an exit code at once, nobody knows who has missed whom.
        """
        found = LOST.match(line.strip())
        if found is None or (found[2] or "").startswith(ENDED):
            return
        killed = not (found[2] or "").startswith("Exited")
        several = "," in found[1] or "[" in found[1]
        named = [] if several else [found[1]]
        if several and killed:
            with suppress(OSError, subprocess.CalledProcessError):  # then nobody is blamed
                named = _expanded(found[1])
        lost = [node for node in self.nodes if node in named]
        if lost and (not self.blamed or (killed and not self.certain)):
            self.blamed, self.certain = lost, killed


def machines_here() -> int:
    """Return how many machines SLURM has given this script; 1 outside of a job, or inside a step."""
    told = os.environ
    return 1 if "SLURM_STEP_ID" in told else int(told.get("SLURM_JOB_NUM_NODES", "1"))


def allocation_here(ranks: int) -> Allocation | None:
    """Return the machines that SLURM has given this script; None outside of a job of several, or
    inside one of its steps.

    Raises
    ------
    LaunchError
        If they cannot be found out, or do not take so many ranks.
    """
    told = os.environ
    if machines_here() == 1:
        return None
    try:
        nodes = _expanded(told.get("SLURM_JOB_NODELIST", ""))
    except (OSError, subprocess.CalledProcessError) as error:
        raise LaunchError(f"SLURM does not say which machines this job has ({error})") from None
    each = int(told.get("SLURM_NTASKS_PER_NODE") or -(-ranks // len(nodes)))
    if ranks % each:
        raise LaunchError(
            f"-n {ranks} does not fill machines of {each} ranks: use a multiple of {each}, or another "
            "--ntasks-per-node"
        )
    if ranks // each > len(nodes):
        raise LaunchError(
            f"-n {ranks} needs {ranks // each} machines of {each} ranks, and the job has "
            f"{len(nodes)}: use -n {each * len(nodes)}, or more --nodes"
        )
    return Allocation(nodes, each, told.get("SLURM_JOB_ID", "0"))


def _expanded(nodes: str) -> list[str]:
    """Return the names that SLURM writes as `n[1-3]`."""
    command = ["scontrol", "show", "hostnames", nodes]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    return answer.stdout.split()


def run_on_machines(
    start: Callable[[list[str], int, int], Outcome], allocation: Allocation, restarts: Restarts
) -> Outcome:
    """Call `start(nodes, ranks, restart)` until the job is done or may not start again; return how
    it ended.
    """
    wanted = restarts.ranks // allocation.each
    outcome = Outcome(1)
    for restart in range(restarts.most + 1):
        nodes = allocation.fit[:wanted]
        ranks = len(nodes) * allocation.each
        ranks -= ranks % restarts.together
        if ranks < max(restarts.least, 1):
            left = f"{ranks} ranks are left, fewer than --min-ranks {restarts.least}"
            print(f"minidist launch: {left}: the job ends", file=sys.stderr)
            break
        if restart:
            places = f"{ranks} ranks on {' '.join(nodes)}"
            counted = f"restart {restart} of at most {restarts.most}"
            print(f"minidist launch: {counted}, {places}", file=sys.stderr, flush=True)
        allocation.blamed, allocation.certain = [], False
        outcome = start(nodes, ranks, restart)
        if outcome.returncode in FINAL or outcome.timed_out:
            break
        if not allocation.blamed:
            print(
                f"minidist launch: the job has lost a rank (status {outcome.returncode}); SLURM does "
                "not say where",
                file=sys.stderr,
            )
            continue
        for node in allocation.blamed:
            allocation.failures[node] += 1
            said = f"minidist launch: the job has lost a rank on {node}"
            if allocation.failures[node] == TWICE:
                said += " for the second time: it is left out"
            print(said, file=sys.stderr)
    return outcome
