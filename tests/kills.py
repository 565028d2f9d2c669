"""A program for tests: train, get killed, resume, and end with the same bits as a run that was left
alone.

    python kills.py FOLDER FIRST EVERY SEED COUNT

First it is killed before the FIRST, FIRST + EVERY, ... touch of a file, then COUNT times at random
moments. A run is a fork of this process, which has imported everything: it starts within
milliseconds. Prints how many kills there were of either kind; fails with an assertion.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from training import RUN, TINY, losses, same_bits, short_text

from minidist.cli.train import main
from minidist.full.checkpoint.store import complete

TOUCHES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir")


def start(folder: Path, kill_at: int = 0) -> int:
    """Start a run in a child, which is to be killed before its n-th touch of a file; return its
    process id.
    """
    child = os.fork()
    if child:
        return child
    touches = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal touches
        if event in TOUCHES or (event == "open" and str(arguments[0]).startswith(str(folder))):
            touches += 1
            if touches == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    with open(folder.with_suffix(".out"), "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    text = folder.with_name("short.txt")
    words = [
        *TINY,
        *RUN.split(),
        "--text",
        str(text),
        "--steps",
        "6",
        "--keep",
        "2",
        "--save",
        str(folder),
    ]
    status = 3
    try:
        status = main([*words, "--resume"] if complete(folder) else words)
    finally:
        sys.stdout.flush()
        os._exit(status)


def end(child: int) -> int:
    """Wait for a run; return its exit status, negative if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check(folder: Path, calm: Path) -> None:
    """Let the run go on to its end, and compare with the one that was left alone."""
    assert end(start(folder)) == 0, folder.with_suffix(".out").read_text()
    assert same_bits(folder / "step-00000006", calm / "step-00000006"), f"{folder} differs"
    assert losses(folder / "metrics.jsonl") == losses(calm / "metrics.jsonl"), folder
    there = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    names = there - {"step-00000004"}  # if killed in the last save
    assert names == {"metrics.jsonl", "step-00000005", "step-00000006"}, names


def kill_at_every_touch(home: Path, calm: Path, first: int, every: int) -> int:
    """Kill before the n-th touch, and again, somewhat later, the run that resumes."""
    kills, number = 0, first
    while True:
        folder = home / f"touch{number}"
        if end(start(folder, number)) == 0:
            return kills
        kills += 1 + (end(start(folder, number + 5)) < 0)
        check(folder, calm)
        number += every


def kill_at_random(home: Path, calm: Path, seed: int, count: int) -> int:
    """Kill whatever it is doing. Counted are the kills that came before the end."""
    chance, kills, runs = random.Random(seed), 0, 0
    while kills < count:
        runs += 1
        folder = home / f"random{runs}"
        while True:
            child = start(folder)
            time.sleep(chance.uniform(0.02, 0.3))
            os.kill(child, signal.SIGKILL)
            if end(child) == 0 or (
                complete(folder) and complete(folder)[-1].name == "step-00000006"
            ):
                break
            kills += 1
        check(folder, calm)
    return kills


if __name__ == "__main__":
    home, calm = Path(sys.argv[1]), Path(sys.argv[1], "calm")
    short_text(home, 700)
    assert main([*TINY, "--steps", "1"]) == 0  # imports what torch imports at the first step
    assert end(start(calm)) == 0, calm.with_suffix(".out").read_text()
    first, every, seed, count = map(int, sys.argv[2:])
    print(
        "kills:",
        kill_at_every_touch(home, calm, first, every),
        kill_at_random(home, calm, seed, count),
    )
