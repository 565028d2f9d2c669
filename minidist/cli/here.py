"""`python -m minidist plan --cluster here`: this machine predicted, and measured, side by side.

    for 2 and 4 ranks, under mpirun:
        two constants      operations a second of a product, bytes a second of a copy; on all ranks at once
        each of four layouts of a small GPT: predict a step from the two, take some, print both

On fewer cores than ranks the constants are those of ranks that share cores. `MOVED` are the bytes that torch's AdamW
moves for a parameter on a CPU, counted from its operations, `FLASH` the speed of torch's attention on a CPU beside that
of a product, for 128 positions; what element-wise work moves is in `software.toml`.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from minidist.comm import Communicator, init
from minidist.launch.jobs import run_job
from minidist.launch.mpirun import environment, find_mpirun
from minidist.mesh import Mesh
from minidist.model import GPTConfig
from minidist.plan.device import Constants, Device, Machine, PlanError, table
from minidist.plan.model import Model
from minidist.plan.run import Setup, Software
from minidist.plan.sent import sent
from minidist.plan.step import step
from minidist.trainer.checked import CheckedRun, check_run, layout_of
from minidist.trainer.flags import parse
from minidist.trainer.loop import Trainer
from minidist.trainer.text import read_corpus

SIZES = "--layers 4 --hidden 256 --heads 4 --intermediate 768 --sequence 128 --batch 32 --steps 7"
LAYOUTS = {
    2: ("--dp 2", "--dp 2 --zero 3", "--tp 2 --sp", "--pp 2 --microbatches 8"),
    4: ("--dp 4", "--dp 4 --zero 1", "--dp 2 --tp 2 --sp", "--dp 2 --pp 2 --microbatches 8"),
}
MOVED = 84.0
COPIED = 1 << 26
FLASH = 0.4
PORT = 5e10  # bytes/s of a GPU to other nodes, where nobody says otherwise: one 400 Gb/s card each


def main() -> int:
    """Predict and measure; return the exit status."""
    mpirun, rows = find_mpirun(), []
    for ranks in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rows.json")
            start = [mpirun.path, "-n", str(ranks), sys.executable, "-m", "minidist.cli.here", str(file)]
            outcome = run_job(start, env=environment(mpirun), timeout=600)
            if outcome.returncode:
                raise PlanError(f"{ranks} ranks under {mpirun.path} ended with status {outcome.returncode}")
            rows += json.loads(file.read_text())
    print(text(rows))
    return 0


def text(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of predicted and measured steps."""
    lines = [
        f"{'ranks':>5} {'predicted':>10}{'measured':>10}{'error':>8}{'MB sent: predicted':>20}{'counted':>9}   layout"
    ]
    for row in rows:
        off = row["seconds"] / row["measured"] - 1
        lines.append(
            f"{row['ranks']:>5} {row['seconds']:>8.3f} s{row['measured']:>8.3f} s{off:>+8.1%}{row['sent'] / 1e6:>20.3f}"
            f"{row['counted'] / 1e6:>9.3f}   {row['layout']}"
        )
    for ranks in LAYOUTS:
        same = [row for row in rows if row["ranks"] == ranks]
        rate, bytes = (median(row[name] for row in same) for name in ("flops", "bandwidth"))
        lines.append(
            f"measured on {ranks} ranks at once: products {rate / 1e9:.1f} GFLOP/s, copies {bytes / 1e9:.1f} GB/s"
        )
    return "\n".join(lines)


def worker(file: str) -> None:
    """Predict and measure each layout as one of the ranks; rank 0 writes the rows."""
    comm, rows = init(), []
    for words in LAYOUTS[comm.size]:
        config = parse([*SIZES.split(), *words.split()])
        tokenizer, samples, _ = read_corpus(config.data)
        mesh = Mesh(comm.split(0), layout_of(config, comm.size))
        run = check_run(config, mesh, tokenizer.vocabulary)
        trainer, before = Trainer(run, samples), machine_here(comm, run)
        outcome = trainer.run()
        after = machine_here(comm, run)
        devices = [before.device, after.device]
        rate, bytes = (sum(getattr(each, name) for each in devices) / 2 for name in ("peak", "bandwidth"))
        planned = run_of(run, replace(before, device=replace(before.device, peak=rate, bandwidth=bytes)))
        steps = [metrics.seconds for metrics in outcome.history[1:]]
        counted = sum(sum(int(both.sum()) for both in each.values()) for each in comm.roll_call(outcome.sent))
        row = {"ranks": comm.size, "layout": words, "seconds": sum(step(planned, exact=True).values())}
        row |= {
            "measured": median(steps),
            "sent": sum(sent(planned).values()),
            "counted": counted / len(outcome.history),
        }
        rows.append(row | {"flops": rate, "bandwidth": bytes * planned.known["streamed"]})
    if comm.rank == 0:
        Path(file).write_text(json.dumps(rows))


def machine_here(comm: Communicator, run: CheckedRun) -> Machine:
    """Measure a product and a copy on all ranks at once; return a machine of such cores. Collective."""
    config, sizes = run.config, run.sizes
    tokens = config.data.batch * config.data.sequence // comm.size
    x = torch.randn(tokens, sizes.hidden, dtype=run.dtype, device=run.device)
    weight = torch.randn(sizes.intermediate, sizes.hidden, dtype=run.dtype, device=run.device)
    product = timed(comm, lambda: x @ weight.T)
    source = torch.zeros(COPIED // 4, device=run.device)  # more than a cache holds, as the activations of a step are
    target = torch.empty_like(source)
    copied = timed(comm, lambda: target.copy_(source))
    rate = 2 * x.numel() * sizes.intermediate / product
    moved = 2 * COPIED / copied
    bandwidth = moved / Constants.table()["streamed"]
    device = Device("here", rate, rate, 1.0, 1e12, bandwidth, 1, moved / 2, FLASH, 0.0, "cpu")
    return Machine("here", device, comm.size, comm.size, moved / 2, 0.0)


def predicted_seconds(run: CheckedRun) -> float | None:
    """Predict a step of `train`: on a GPU of the table, or on these cores if `--peak-tflops` asks for utilisation.

    None where nothing is known of the device. Collective.
    """
    comm = run.mesh.world
    if run.device.type == "cuda":
        name = known_device(torch.cuda.get_device_name(run.device))
        if not name:
            return None
        device = Device.named(name)
        machine = Machine(device.name, device, comm.size, len(comm.node), PORT * len(comm.node), 0.0)
        planned = replace(run_of(run, machine), known=Constants.table())
    elif run.config.run.peak_tflops:
        planned = run_of(run, machine_here(comm, run))
    else:
        return None
    return sum(step(planned, exact=True).values())


def known_device(said: str) -> str:
    """Return which device of the table a GPU is that calls itself so, as "NVIDIA A100-SXM4-80GB"; nothing if none."""
    found = [name for name in table("devices") if all(part in said.lower() for part in name.split("-"))]
    return max(found, key=len, default="")


def timed(comm: Communicator, work: Callable[[], object], times: int = 15) -> float:
    """Return the median seconds of some work, the mean of all ranks."""
    comm.barrier()
    found = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return float(sum(comm.roll_call(median(found)))) / comm.size


def run_of(run: CheckedRun, machine: Machine) -> Setup:
    """Return what the planner calls a run of `train`, in the package's own software."""
    config, layout, recipe = run.config, run.mesh.layout, run.fit.recipe
    rows = -(-config.data.batch // (layout.dp * recipe.microbatches))
    width = run.dtype.itemsize
    name = "minidist-compiled" if recipe.compile else "minidist" if width == 2 else "minidist-32"
    software = replace(Software.named(name), width=width, gradients=width)
    plan = run.fit.plan
    return Setup(
        model_of(run.sizes),
        machine,
        config.data.sequence,
        config.data.batch,
        rows,
        **{axis: getattr(layout, axis) for axis in ("tp", "pp", "dp", "cp", "ep")},
        chunks=recipe.chunks,
        schedule=plan.name if plan else "1f1b",
        sp=recipe.sequence,
        zero=recipe.zero,
        shard=recipe.shard_ranks or 0,
        recompute=recipe.recompute if recipe.recompute in ("full", "selective") else "none",
        order=layout.order,
        software=software,
        known=Constants.table().but(optimizer_bytes=MOVED),
    )


def model_of(sizes: GPTConfig) -> Model:
    """Return what the planner calls a GPT's sizes."""
    found = asdict(sizes)
    names = ("layers", "hidden", "heads", "vocabulary", "tied", "experts", "top_k", "head_dim")
    return Model(
        **{name: getattr(sizes, name) for name in names},
        kv=sizes.key_value_heads,
        ffn=sizes.intermediate,
        shared=found.get("shared_experts", 0),
    )


if __name__ == "__main__":
    worker(sys.argv[1])
