"""`python -m minidist bench elastic`: how long a job stands still when a rank is killed, on two gloo
ranks, and where the seconds go.

    what is left     the other rank goes on alone                       launch --replace
    a spare          a third process waits, and takes the place         launch --replace --spares 1
    replaced         another process is started, the rank waits for it  launch --replace --min-ranks 2
    restarted        the whole job starts again, from a checkpoint      launch --max-restarts

Each is measured several times, in turns. `observed` is a step that is told to TensorBoard and
Prometheus, beside one that is not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from minidist.bench.options import check_writable
from minidist.draw.table import aligned
from minidist.full.launch.jobs import run_job
from minidist.full.launch.mpirun import environment
from minidist.full.launch.parser import Parser, flag_of
from minidist.full.options import AT_LEAST_ONE

STEP = 12  # in which member 1 is killed
PROGRAM = """
import json, os, signal, sys, time
began = time.time()
from minidist.__main__ import main
from minidist.full.trainer.loop import Trainer

log, number = os.environ["BENCH_LOG"], int(os.environ.get("MINIDIST_MEMBER") or os.environ["RANK"])
again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + (number > 1)

def note(what, when=None, step=0):
    with open(log, "a") as lines:
        lines.write(json.dumps([what, step, again, when or time.time()]) + "\\n")

note("began", began)
note("imported")
spread, update = Trainer.spread, Trainer.update

def spread_noted(self):
    note("read")
    return spread(self)

def update_noted(self):
    norm = update(self)
    note("step", step=self.done + 1)
    if number == 1 and not again and self.done == STEP_OF_DEATH:
        note("killed")
        os.kill(os.getpid(), signal.SIGKILL)
    return norm

Trainer.spread, Trainer.update = spread_noted, update_noted
sys.exit(main(["train", *sys.argv[1:]]))
"""
WORDS = (
    "--layers 4 --hidden 128 --heads 4 --sequence 64 --batch 8 --warmup 2 --log-every 1000 "
    "--held-out 0.3"
)
CASES: dict[str, tuple[str, ...]] = {
    "what is left": ("--replace",),
    "a spare": ("--replace", "--spares", "1"),
    "replaced": ("--replace", "--max-restarts", "1", "--min-ranks", "2"),
    "restarted": (),
}


def main(argv: Sequence[str]) -> int:
    """Measure, and print tables; return 0, or 2 for what cannot be measured."""
    parser = Parser(prog="minidist bench elastic", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--repeat", type=flag_of(int, AT_LEAST_ONE), default=5, help="times (5)")
    parser.add_argument("--json", default="", help="file for the figures, or -")
    options = parser.parse_args(argv)
    check_writable(parser, options.json)
    if not importlib.util.find_spec("tensorboardX"):
        parser.error("what it tells steps to is not here: pip install tensorboardX")
    found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for turn in range(options.repeat):
        for case, words in CASES.items():
            found[case].append(seconds_of(case, words))
            print(f"turn {turn + 1}: {case}, {found[case][-1]['still']:.2f} s", file=sys.stderr)
    medians = {
        case: {what: median(each[what] for each in turns) for what in turns[0]}
        for case, turns in found.items()
    }
    observed = seconds_of_observing(options.repeat)
    if options.json:
        text = json.dumps({"seconds": found, "observed": observed}, indent=1)
        print(text) if options.json == "-" else Path(options.json).write_text(text + "\n")
    if options.json != "-":
        print(table(medians, observed))
    return 0


def seconds_of(case: str, words: Sequence[str]) -> dict[str, float]:
    """Run a job in which member 1 is killed; return how long nobody took a step, and the parts of
    it.
    """
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        program, log = home / "program.py", home / "log"
        program.write_text(PROGRAM.replace("STEP_OF_DEATH", str(STEP - 1)))
        env = environment() | {"BENCH_LOG": str(log)}
        save = ["--save", str(home / "run"), "--save-every", "1"] if case == "restarted" else []
        train = [*WORDS.split(), "--steps", "40", *save]
        if case == "restarted":  # torchrun itself starts all ranks again
            start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
            command = [*start, "--max-restarts", "1", str(program), *train]
        else:
            start = [sys.executable, "-m", "minidist", "launch", "-n", "2", *words]
            command = [*start, str(program), *train]
        done = run_job(command, env=env, timeout=120, capture=True)
        if done.returncode:
            raise SystemExit(f"minidist bench: {case} has failed:\n{done.stderr}")
        return parts([json.loads(line) for line in log.read_text().splitlines()])


def parts(events: Sequence[tuple[str, int, int, float]]) -> dict[str, float]:
    """Return the seconds from the kill to the next step, and of them those of a process that was
    started after it.
    """
    killed = next(when for what, _, _, when in events if what == "killed")
    steps = [when for what, step, _, when in events if what == "step" and step > STEP]
    found = {"still": min(steps) - killed}
    new = {what: when for what, _, again, when in reversed(events) if again and when > killed}
    if {"began", "imported", "read"} <= new.keys():
        found |= {
            "noticed and started": new["began"] - killed,
            "imported torch": new["imported"] - new["began"],
            "met, read the text": new["read"] - new["imported"],
            "spread, fetched, first step": new["step"] - new["read"],
        }
    return found


def seconds_of_observing(repeat: int) -> float:
    """Return how much longer a step is that is told to TensorBoard."""
    from minidist.full.trainer.metrics import StepMetrics
    from minidist.full.trainer.observed.exports import exports_of
    from minidist.full.trainer.observed.stragglers import Computing

    folder = tempfile.mkdtemp()
    try:
        exports = exports_of(os.path.join(folder, "curves"), 0)
        told = []
        for step in range(1, 200 * repeat):
            computing = Computing(0.1, 1, 0.1, None)
            sent = {"dp": step, "tp": step, "pp": step}
            metrics = StepMetrics(
                step, 1.0, 1.0, 1e-3, 0.1, 1e4, 0.1, computing=computing, sent=sent
            )
            began = time.perf_counter()
            for export in exports:
                export.step(metrics)
            told.append(time.perf_counter() - began)
        for export in exports:
            export.close()
        return median(told)
    finally:
        shutil.rmtree(folder)


def table(medians: Mapping[str, Mapping[str, float]], observed: float) -> str:
    """Return the figures as text."""
    kinds = list(dict.fromkeys(what for each in medians.values() for what in each))
    rows = [
        (case, *(f"{each[what]:.2f} s" if what in each else "" for what in kinds))
        for case, each in medians.items()
    ]
    head = ("a rank is killed", "no step for", *kinds[1:])
    said = (
        f"telling a step to TensorBoard takes {observed * 1e3:.2f} ms: "
        f"{observed / 0.1:.2%} of a step of 0.1 s"
    )
    return f"{aligned(head, rows)}\n\n{said}"
