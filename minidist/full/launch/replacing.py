"""A job whose ranks are replaced while the others wait: processes that are members of one job.

    launcher   the store ─┬─ member 0
                          ├─ member 1   ✗ ended: "dead: 1"; member 4 is started in its place
                          ├─ member 2
                          └─ member 3   a spare, which waits outside

The launcher starts processes, writes down who has ended, and ends who hangs. The members decide by
themselves who goes on (`full/comm/membership/`). If the launcher is killed, they end.
"""

import secrets
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence

from minidist.full.comm.membership.agreement import Wanted
from minidist.full.launch.jobs import MARK, TIMED_OUT, Outcome, end_job
from minidist.full.launch.restarts import FINAL, Restarts

LOOK = 0.05  # seconds between two looks
GRACE = 2.0  # seconds between SIGTERM and SIGKILL
LAST = 10.0  # seconds that members have to end once the job is done
NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else torch ends whoever has lost its peer
    # a rank that is lost while the others connect must not keep them
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "20",
}


class Launcher:
    """Starts the members of one job, and looks after them.

    Parameters
    ----------
    command : sequence of str
        What each member runs.
    restarts : Restarts
        How many there are, and how many may be started in place of others.
    warned : collection of signals
        A scheduler's warnings that have come: then nobody is started any more.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        restarts: Restarts,
        warned: Collection[int] = (),
    ) -> None:
        # here, because it imports torch
        from minidist.full.comm.torch_wire.tcp_store import TcpStore

        self.store = TcpStore("127.0.0.1", 0, serve=True)
        self.command, self.restarts, self.mark = command, restarts, secrets.token_hex(8)
        started = restarts.ranks + restarts.spares
        wanted = Wanted(restarts.ranks, restarts.least, restarts.together)
        self.env = {
            **env,
            MARK: self.mark,
            "MINIDIST_STORE": self.store.address,
            "MINIDIST_WANTED": ",".join(map(str, [*wanted, started])),
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # a lost connection is no news here
            "LOCAL_WORLD_SIZE": str(started),
            **NCCL,
        }
        self.left, self.warned = restarts.most, warned
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.places: list[int] = []  # of each member on this machine: whose GPU it takes
        self.view: tuple[int, frozenset[int]] = 0, frozenset()
        for place in range(started):
            self.start(place)

    def start(self, place: int) -> None:
        """Start one more member, under a new number."""
        number = len(self.processes)
        self.places.append(place)
        env = self.env | {"MINIDIST_MEMBER": str(number), "LOCAL_RANK": str(place)}
        self.processes[number] = subprocess.Popen(self.command, env=env, start_new_session=True)

    def run(self, timeout: float | None) -> Outcome:
        """Wait until the job has ended, and return how; leave no process behind."""
        deadline = time.monotonic() + (timeout or float("inf"))
        alive, statuses = set(self.processes), {}
        try:
            while alive and time.monotonic() < deadline:
                for number in sorted(alive):
                    status = self.processes[number].poll()
                    if status is None:
                        continue
                    alive.discard(number)
                    statuses[number] = status
                    if status not in FINAL:
                        alive |= self.replace(number, status, alive)
                self.end_hanging()
                if self.store.read("done") or 2 in statuses.values():
                    deadline = min(deadline, time.monotonic() + LAST)
                time.sleep(LOOK)
        finally:
            for process in self.processes.values():
                end_job(process.pid, self.mark, GRACE if process.poll() is None else 0.0)
        if self.store.read("done"):
            return Outcome(max(map(int, self.store.read("statuses").split())))
        if 2 in statuses.values():
            return Outcome(2)
        if alive:
            return Outcome(TIMED_OUT, timed_out=True)
        # a shell's number for "ended by a signal"
        return Outcome(max(128 - status if status < 0 else status for status in statuses.values()))

    def replace(self, number: int, status: int, alive: set[int]) -> set[int]:
        """Write down that a member is dead, and start another if that is allowed; return it."""
        self.store.append("dead", f"{number} ")
        line = f"minidist launch: member {number} is lost (status {status})"
        if self.store.read("done"):
            return set()
        if not self.left or self.warned:
            few = len(alive) < self.restarts.least
            print(f"{line}; {'too few are left' if few else 'the others go on'}", file=sys.stderr)
            if few:
                self.store.claim("ended", f"{len(alive)} ranks are left")
            return set()
        self.left -= 1
        self.start(self.places[number])
        new = len(self.processes) - 1
        print(
            f"{line}; member {new} is started, {self.left} more may be", file=sys.stderr, flush=True
        )
        return {new}

    def end_hanging(self) -> None:
        """End members of the last view that have not come to the next one."""
        number, members = self.view
        if not (now := self.store.read(f"view {number + 1}")):
            return
        view = frozenset(map(int, now.split()))
        came = {
            int(word.split(",")[0]) for word in self.store.read(f"present {number + 1}").split()
        }
        for hanging in members - view - came:
            if self.processes[hanging].poll() is None:
                print(f"minidist launch: member {hanging} hangs: it is ended", file=sys.stderr)
                self.processes[hanging].kill()
        self.view = number + 1, view


def run_replacing(
    command: Sequence[str],
    env: Mapping[str, str],
    restarts: Restarts,
    timeout: float | None,
    warned: Collection[int] = (),
) -> Outcome:
    """Run a job whose lost ranks are replaced while the others wait; return how it ended."""
    return Launcher(command, env, restarts, warned).run(timeout)
