"""Where each rank stood when the time was up, from what `faulthandler` wrote down.

0x00007f3a5c2f16c0 = rank 1                                 written by the child when the rank starts
Thread 0x00007f3a5c2f16c0 (most recent call first):         and this by faulthandler
  File ".../minidist/full/comm/threads_wire/world.py", line 127 in wait
  File ".../exercise.py", line 14 in ring_all_gather        ─▶ rank 1 waits at exercise.py:14
"""

import re
from pathlib import Path

OWNER = re.compile(r"^(0x[0-9a-f]+) = (rank \d+)$", re.MULTILINE)
THREAD = re.compile(r"^(?:Current t|T)hread (0x[0-9a-f]+) .*\n((?:  File .*\n?)*)", re.MULTILINE)
FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')


def hang_report(folder: Path, ranks: int, limit: float) -> str:
    """Say where each rank stood when the time was up; return nothing if it was not."""
    places: dict[str, str] = {}
    texts = [
        path.read_text(errors="replace")
        for path in sorted(folder.glob("hang-*.txt"))
        if path.is_file()
    ]
    if not any("\nTimeout (" in text for text in texts):
        return ""
    for text in texts:
        owners = dict(OWNER.findall(text))
        for thread, frames in THREAD.findall(text):
            lines = FRAME.findall(frames)
            own = [
                f"exercise.py:{line} in {name}"
                for file, line, name in lines
                if Path(file).name == "exercise.py"
            ]
            if thread in owners and own:
                waits = "waits" if Path(lines[0][0]).name != "exercise.py" else "is still"
                places[owners[thread]] = f"{waits} at {own[0]}"
    said = [
        f"rank {rank} {places.get(f'rank {rank}', 'is not in exercise.py')}"
        for rank in range(ranks)
    ]
    return f"it did not end within {limit:g} seconds: " + ", ".join(said)
