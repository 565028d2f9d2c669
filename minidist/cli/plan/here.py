"""`python -m minidist plan --cluster here`: this machine predicted, and measured, side by side.

    for 2 and 4 ranks, under mpirun:
        two constants      operations a second of a product, bytes a second of a copy; on all ranks at once
        each of four layouts of a small GPT: predict a step from the two, take some, print both

Other programs take their share of a machine as they please, so the constants are measured anew
before and after each step, each step has a prediction of its own, and the error is the median of
all. On fewer cores than ranks the constants are those of ranks that share cores. `train` shows in
the same way the utilisation that is predicted for it.

`MOVED` are the bytes that torch's AdamW moves for a parameter on a CPU, counted from its
operations, `FLASH` the speed of torch's attention on a CPU beside that of a product, for 128
positions. No host has to launch anything there.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from minidist.cli.plan.runnable import OF_EXPERTS, OF_MODEL
from minidist.draw.table import aligned
from minidist.full.comm import Communicator, init
from minidist.full.data.text import read_corpus
from minidist.full.launch.jobs import run_job
from minidist.full.launch.mpirun import environment, find_mpirun
from minidist.full.mesh import Mesh
from minidist.full.trainer.checked import CheckedRun, check_run, layout_of
from minidist.full.trainer.loop import Trainer
from minidist.full.trainer.metrics import Reporter, StepMetrics
from minidist.full.trainer.start import start_of
from minidist.further import parse
from minidist.plan.device import Constants, Device, Machine, PlanError
from minidist.plan.model import Model
from minidist.plan.run import Setup, Software
from minidist.plan.step import step
from minidist.plan.traffic import bytes_sent

SIZES = "--layers 4 --hidden 256 --heads 4 --intermediate 768 --sequence 128 --batch 32 --steps 7"
LAYOUTS = {
    2: ("--dp 2", "--dp 2 --zero 3", "--tp 2 --sp", "--pp 2 --microbatches 8"),
    4: ("--dp 4", "--dp 4 --zero 1", "--dp 2 --tp 2 --sp", "--dp 2 --pp 2 --microbatches 8"),
}
HEADER = (
    "layout",
    "ranks",
    "predicted",
    "measured",
    "error",
    "MB sent, predicted",
    "counted",
    "GFLOP/s",
    "GB/s",
)
MOVED, FLASH = 84.0, 0.4
COPIED = 1 << 26  # bytes: more than a cache holds, as the activations of a step are
PORT = 5e10  # bytes/s of a GPU to other nodes, where nobody says otherwise: one 400 Gb/s card each


def main() -> int:
    """Predict and measure; return the exit status."""
    mpirun, rows = find_mpirun(), []
    for ranks in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rows.json")
            start = [
                mpirun.path,
                "-n",
                str(ranks),
                sys.executable,
                "-m",
                "minidist.cli.plan.here",
                str(file),
            ]
            if status := run_job(start, env=environment(mpirun), timeout=600).returncode:
                raise PlanError(f"{ranks} ranks under {mpirun.path} ended with status {status}")
            rows += json.loads(file.read_text())
    print(aligned(HEADER, rows))
    return 0


def worker(file: str) -> None:
    """Predict and measure each layout as one of the ranks; rank 0 writes the rows."""
    comm = init()
    rows = [row(comm, words) for words in LAYOUTS[comm.size]]
    if comm.rank == 0:
        Path(file).write_text(json.dumps(rows))


def row(comm: Communicator, words: str) -> Sequence[str]:
    """Predict and measure a layout; return its row of the table. Collective."""
    config = parse([*SIZES.split(), *words.split()])
    tokenizer, samples, *_ = read_corpus(config.data)
    run = check_run(config, Mesh(comm.split(0), layout_of(config, comm.size)), tokenizer.vocabulary)
    between = Between(run)
    outcome = Trainer(run, start_of(run, samples)).run(between)
    pairs = [
        *zip(pairwise(between.machines), (each.seconds for each in outcome.history), strict=True)
    ][1:]
    predicted = [fmean(seconds_on(run, machine) for machine in around) for around, _ in pairs]
    measured = [seconds for _, seconds in pairs]
    error = median(ours / theirs for ours, theirs in zip(predicted, measured, strict=True)) - 1
    planned = run_of(run, between.machines[0])
    counted = sum(
        int(both.sum()) for each in comm.all_gather_object(outcome.sent) for both in each.values()
    )
    megabytes = [sum(bytes_sent(planned).values()) / 1e6, counted / len(outcome.history) / 1e6]
    speeds = [median(each.device.peak for each in between.machines) / 1e9]
    speeds += [2 * median(each.device.link for each in between.machines) / 1e9]
    times = [f"{median(predicted):.3f} s", f"{median(measured):.3f} s", f"{error:+.1%}"]
    return [
        words,
        str(comm.size),
        *times,
        *(f"{each:.3f}" for each in megabytes),
        *(f"{each:.1f}" for each in speeds),
    ]


class Between(Reporter):
    """Measures the machine before the first step and after each."""

    def __init__(self, run: CheckedRun) -> None:
        self.run = run
        self.machines = [machine_here(run.mesh.world, run)]

    def step(self, metrics: StepMetrics) -> None:
        """Measure once more."""
        self.machines.append(machine_here(self.run.mesh.world, self.run))


def machine_here(comm: Communicator, run: CheckedRun) -> Machine:
    """Measure a product and a copy on all ranks at once; return a machine of such cores.

    Collective.

    The product is one of the run's own: a microbatch into the MLP, with the two of its backward.
    """
    layout, recipe, data = run.mesh.layout, run.fit.recipe, run.config.data
    tokens = data.batch * data.sequence // (layout.data * recipe.microbatches)
    x = torch.randn(tokens, run.sizes.hidden, dtype=run.config.dtype)
    weight = torch.randn(run.sizes.intermediate // layout.tp, run.sizes.hidden, dtype=x.dtype)
    y = x @ weight.T
    rate = 6 * x.numel() * len(weight) / timed(comm, lambda: (x @ weight.T, y @ weight, y.T @ x))
    source = torch.zeros(COPIED // 4)
    target = torch.empty_like(source)
    moved = 2 * COPIED / timed(comm, lambda: target.copy_(source))
    bandwidth = moved / Constants.table()["streamed"]
    device = Device("here", rate, rate, 1.0, 1e12, bandwidth, 1, moved / 2, FLASH, 0.0, "cpu")
    return Machine("here", device, comm.size, comm.size, moved / 2, 0.0)


def timed(comm: Communicator, work: Callable[[], object]) -> float:
    """Return the median seconds of some work on the slowest rank, for which the others wait."""

    def once(_: int) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    comm.barrier()
    return float(max(comm.all_gather_object(median(map(once, range(7))))))


def seconds_on(run: CheckedRun, machine: Machine) -> float:
    """Predict a step on a machine of cores."""
    return sum(step(run_of(run, machine), exact=True).values())


def run_of(run: CheckedRun, machine: Machine) -> Setup:
    """Return what the planner calls a run of `train`, in the package's own software."""
    data, layout = run.config.data, run.mesh.layout
    recipe, sizes = run.fit.recipe, run.sizes
    width = run.config.dtype.itemsize
    names = OF_MODEL | OF_EXPERTS | {"vocabulary": "vocabulary", "head_dim": "head_dim"}
    model: dict[str, Any] = {ours: getattr(sizes, theirs) for ours, theirs in names.items()}
    axes: dict[str, Any] = {
        axis: getattr(layout, axis) for axis in ("tp", "pp", "dp", "cp", "ep", "order")
    }
    generation = "minidist" if width == 2 else "minidist-32"
    if recipe.compile:
        generation = "minidist-compiled"
    return Setup(
        Model(**model),
        machine,
        data.sequence,
        data.batch,
        -(-data.batch // (layout.dp * recipe.microbatches)),
        **axes,
        chunks=recipe.chunks,
        schedule=run.fit.plan.name if run.fit.plan else "1f1b",
        sp=recipe.sp,
        zero=recipe.zero,
        hsdp=recipe.hsdp,
        recompute=recipe.recompute,
        software=replace(Software.named(generation), width=width, gradients=width),
        known=Constants.table().but(optimizer_bytes=MOVED, host=0.0, synchronize=0.0),
    )


if __name__ == "__main__":
    worker(sys.argv[1])
