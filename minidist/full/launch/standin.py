"""Fork ranks off a process that has imported what they need. What a launcher starts only stands in
for a rank.

    mpirun ─▶ stand-in ── its descriptors, folder, environment ─▶ warm process ── fork ─▶ the rank
              (bare Python, 20 ms) ◀───────── status ──────────

A launcher knows a rank by the descriptors and the environment that it gave it, so a fork that has
both is that rank. The stand-in ends as the rank does, and the system kills a rank whose stand-in
has ended. Linux only.
"""

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Collection
from contextlib import suppress

if sys.platform == "linux":
    import fcntl

STAND_IN = """
import json, os, socket, sys
warm = socket.socket(socket.AF_UNIX)
warm.connect(sys.argv[1])
with os.scandir("/proc/self/fd") as entries:
    numbers = [int(entry.name) for entry in entries]
numbers = [number for number in numbers if number != warm.fileno() and os.path.exists(f"/proc/self/fd/{number}")]
socket.send_fds(warm, [b"."], numbers)
warm.sendall(json.dumps([numbers, os.getcwd(), dict(os.environ), sys.argv[2:]]).encode() + b"\\n")
for number in numbers:
    if number > 2:
        os.close(number)  # a launcher takes the end of these for the end of the rank
status = int(warm.recv(8) or 1)
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""
MOST = 100  # descriptors of one stand-in
FREE = 500  # from here on, numbers of descriptors that nobody uses


def fork_ranks(
    listener: socket.socket, ranks: float, ended: Callable[[Collection[int]], object]
) -> list[str] | None:
    """Fork a rank for each of the next `ranks` stand-ins that connect, and wait until all have
    ended.

    When one has ended, `ended` is called with the others' process numbers, and only then does its
    stand-in end.

    Returns
    -------
    list of str or None
        In a fork, which by then has taken its stand-in's place: the last arguments of the
        stand-in's command line. In the process that forks: None.
    """
    alive: dict[int, tuple[int, socket.socket]] = {}
    while ranks or alive:
        waited_for: list[int | socket.socket] = [*alive, *([listener] if ranks else [])]
        for ready in select.select(waited_for, [], [])[0]:
            if isinstance(ready, int):
                os.close(ready)
                pid, stand_in = alive.pop(ready)
                with stand_in:
                    status = os.waitpid(pid, 0)[1]
                    ended([other for other, _ in alive.values()])
                    with suppress(OSError):  # the stand-in was ended first
                        stand_in.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            else:
                ranks -= 1
                stand_in = listener.accept()[0]
                pid = os.fork()
                if pid == 0:
                    for descriptor in (
                        listener.detach(),
                        *alive,
                        *(other.detach() for _, other in alive.values()),
                    ):
                        os.close(descriptor)
                    return take_the_place(stand_in)
                alive[os.pidfd_open(pid)] = pid, stand_in
    return None


def take_the_place(stand_in: socket.socket) -> list[str]:
    """Take over a stand-in's descriptors, folder and environment, and end with it.

    Return its arguments.
    """
    descriptors = socket.recv_fds(stand_in, 1, MOST)[1]
    with stand_in, stand_in.makefile("rb") as said:
        numbers, folder, environment, arguments = json.loads(said.readline())
        end_with(fcntl.fcntl(stand_in, fcntl.F_DUPFD_CLOEXEC, FREE))
    # one may lie where another belongs
    parked = [fcntl.fcntl(number, fcntl.F_DUPFD, FREE) for number in descriptors]
    for number in descriptors:
        os.close(number)
    for place, number in zip(parked, numbers, strict=True):
        os.dup2(place, number)
        os.close(place)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return [str(argument) for argument in arguments]


def end_with(stand_in: int) -> None:
    """Have the system kill this process once nobody holds the other end of the connection."""
    fcntl.fcntl(stand_in, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(stand_in, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(stand_in, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([stand_in], [], [], 0)[0]:  # it has ended already
        os._exit(1)
