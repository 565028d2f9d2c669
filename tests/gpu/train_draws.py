"""On every rank: `train --verify` with layouts and options that are drawn, one run after the other.

python -m minidist launch -n 4 --ranks-per-gpu 4 tests/gpu/train_draws.py 0 14             seeds 0 to 13
python -m minidist launch -n 4 --ranks-per-gpu 4 tests/gpu/train_draws.py 5 1 --compile    one of them, compiled
"""

from __future__ import annotations

import io
import shlex
import sys
import time
from contextlib import redirect_stdout
from random import Random
from typing import Any

import minidist
from minidist.cli.train import train
from minidist.full.mesh import Layout
from minidist.full.pipeline import NAMES
from minidist.full.pipeline.schedules import CHUNKED, V_SHAPED
from minidist.full.recipe import NO_PIPELINE
from minidist.further import Recipe

TINY = "--hidden 16 --heads 4 --sequence 16 --steps 2 --warmup 1 --lr 0.01 --sample 0 --verify"
PRECISIONS = ("float64", "bfloat16", "float64", "float32", "float64", "float16", "fp8")
RECOMPUTES = ("none", "full", "none", "selective", "sqrt", '"every 2"')
VERDICTS = ("same parameters as the serial run", "same bits on every rank")
# Adam divides a gradient by its own size. Of those near 0, a few lose most digits in float32, and
# in the serial run others than in ours: now and then a right run is more than twice as far from
# float64 as it. This is far for float32.
FLOAT32 = 1e-5


def turn(name: str, values: Any, seed: int) -> Any:
    """Return one of the values. Of as many seeds in a row as there are values, each has another
    one.
    """
    lap, place = divmod(seed, len(values))
    return Random(f"{name} {lap}").sample(values, len(values))[place]


def layouts(ranks: int) -> list[Layout]:
    sizes = range(1, ranks + 1)
    return [
        Layout(dp=dp, pp=pp, tp=tp)
        for dp in sizes
        for pp in sizes
        for tp in sizes
        if dp * pp * tp == ranks
    ]


def data_axis(dp: int, ranks: int, schedule: str) -> list[str]:
    """Return the ways to share a batch out, where there is something to share; on one rank alone,
    they work, too.
    """
    if dp == 1 < ranks:
        return [""]
    ways = ["", "--strategy naive", "--strategy server", "--zero 1 --bucket-mib 0.001"]
    return ways + ["--zero 2", "--zero 3", f"--zero 3 --hsdp {max(1, dp // 2)}"] * (
        3 in Recipe.supported[schedule]
    )


def draw(seed: int, ranks: int) -> list[str]:
    """Return the words of a run that is not refused. Every second one has a pipeline, if there are
    several ranks.
    """
    piped = seed % 2 == 0 and ranks > 1
    schedule = turn("schedule", NAMES, seed // 2) if piped else NO_PIPELINE
    kinds = [
        (layout, f"{how} {sequence}")
        for layout in layouts(ranks)
        for how in data_axis(layout.dp, ranks, schedule)
        for sequence in (("", "--sp") if layout.tp > 1 else ("",))
        if (layout.pp > 1) is piped
    ]
    layout, how = turn(f"sharing {len(kinds)}", kinds, seed // 2 if ranks > 1 else seed)
    precision = turn("precision", PRECISIONS, seed)
    if precision == "fp8" and precision not in Recipe.supported[schedule]:
        precision = "float32"
    chunks = 2 if schedule in (*CHUNKED, *V_SHAPED) else 1
    words = [f"{TINY} --dp {layout.dp} --pp {layout.pp} --tp {layout.tp} {how} --seed {seed}"]
    words += [f"--layers {max(4, chunks * layout.pp)}", f"--batch {turn('batch', (16, 13), seed)}"]
    words += [
        f"--precision {precision}",
        f"--recompute {turn('recompute', RECOMPUTES, seed)}",
    ]
    words += [f"--dropout {turn('dropout', (0, 0.1), seed)}", turn("tied", ("", "--tied"), seed)]
    words += [turn("offload", ("", "", "--offload memory"), seed)]
    if piped:
        words += [
            f"--schedule {schedule} --microbatches {layout.pp * turn('microbatches', (2, 3), seed)}"
        ]
    else:
        words += [f"--accumulate {turn('accumulate', (1, 2), seed)}"]
    if layout.tp < 4:
        words += [turn("heads", ("", "--key-value-heads 2"), seed)]
    return shlex.split(" ".join(words))


def is_right(argv: list[str], status: int, said: str) -> bool:
    """Tell whether a run has given what it should. `said` is what rank 0 printed."""
    if "--no-verify" in argv:
        return status == 0
    same, alike = (
        next((line for line in map(squeezed, said.splitlines()) if line.startswith(words)), "")
        for words in VERDICTS
    )
    if (
        status == 1
        and "float32" in argv
        and alike.endswith(" yes")
        and "WHICH IT IS NOT" not in said
    ):
        return float(same.split()[-1]) <= FLOAT32
    return status == 0 and f"{VERDICTS[0]} yes" in same


def squeezed(line: str) -> str:
    return " ".join(line.split())


def main(words: list[str]) -> int:
    """Train each of the runs that the words name; return how many failed."""
    comm, out, failed = minidist.init(), sys.stdout, []
    if words[0].isdigit():
        seeds = range(int(words[0]), int(words[0]) + int(words[1]))
        runs = {f"seed {seed}": [*draw(seed, comm.size), *words[2:]] for seed in seeds}
    else:
        runs = {f"run {number}": shlex.split(f"{TINY} {one}") for number, one in enumerate(words)}
    for name, argv in runs.items():
        said, started = io.StringIO(), time.perf_counter()
        if comm.rank == 0:
            where = f"{name} on {comm.size} ranks, {'NCCL' if comm.wire.carries_cuda else 'gloo'}"
            print(f"{where}: train {shlex.join(argv)}", file=out, flush=True)
        with redirect_stdout(said):
            status = max(comm.all_gather_object(train(argv, comm)))
        if comm.rank == 0:
            verdict = "right" if is_right(argv, status, said.getvalue()) else "WRONG"
            lines = [
                line
                for line in map(squeezed, said.getvalue().splitlines())
                if line.startswith(VERDICTS)
            ]
            seconds = time.perf_counter() - started
            print(
                f"  {verdict}, {seconds:.1f} s: {'; '.join(lines) or said.getvalue()}",
                file=out,
                flush=True,
            )
            failed += [name] if verdict == "WRONG" else []
    if failed:
        print(f"wrong on {comm.size} ranks: {', '.join(failed)}", file=sys.stderr, flush=True)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
