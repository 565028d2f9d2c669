"""`python -m minidist bench NAME`: minidist and its peers in one run, taking turns.

    python -m minidist bench all-reduce
      ├─ mpirun -n 2 ... worker, malloc as shipped       auto, handle, registered, native, gloo     A B C D E A B ...
      ├─ mpirun -n 2 ... worker, told to keep memory     auto, handle, registered, native           A B C D A B ...
      └─ tables: medians, quartiles, bus bandwidth, ratios within a launch, bounds

The second launch is there because MPI allocates a temporary in each call, and fresh memory costs a
page fault every 4 KiB. If it is told to keep freed memory, its all-reduce of 64 MiB is 2.5 times as
fast: that is the honest peer.

`subject.py` says how a bench is declared, `bounds.toml` what is promised. `subjects/` has the
benches, one in a file: `ddp.py` is a good first read. `training.py` has the model and the steps
that the benches of training share. The rest is the same for all: `options.py` reads the command
line, `worker.py` is what each rank runs, `measure.py` lets the competitors take turns, and
`report.py` compares the ratios with the bounds.

Two benches are for GPUs. `bench gpu` (`gpu/`) measures in this process, and `bench nccl`
(`nccl.py`) starts torchrun in place of mpirun. `bench elastic` (`elastic.py`) kills ranks of whole
jobs, and `bench engines` (`engines.py`) times the engines of simulated ranks.
"""

import json
import os
import pickle
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from minidist.bench.measure import Measurement
from minidist.bench.options import Options, parse
from minidist.bench.report import Results
from minidist.bench.subject import Setting
from minidist.full.comm import LaunchError, init
from minidist.full.launch.jobs import run_job
from minidist.full.launch.mpirun import environment, find_mpirun

STARTED = {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "TORCHELASTIC_RUN_ID"}  # by a launcher
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}


def main(argv: list[str]) -> int:
    """Measure, print tables, write JSON. Returns 0 also if a bound was missed: the tables say so.

    Parameters
    ----------
    argv : list[str]
        What follows `bench` on the command line.
    """
    if argv[:1] == ["elastic"]:
        from minidist.bench import elastic  # which times jobs, and not calls

        return elastic.main(argv[1:])
    if argv[:1] == ["engines"]:
        from minidist.bench import engines  # which times simulated ranks, in one process

        return engines.main(argv[1:])
    options = parse(argv)
    measurements: list[Measurement] = []
    described: dict[str, object] = {}
    try:
        if STARTED & os.environ.keys():
            raise LaunchError(
                "start it without mpirun or torchrun; it starts --ranks of them itself"
            )
        for launch in options.launches:
            seen, found = run_workers(launch, options, argv)
            described |= {key: value for key, value in seen.items() if value}
            measurements += found
    except LaunchError as error:
        sys.stderr.write(f"minidist bench: {error}\n")
        return 2
    bounds_model = "H100" in str(described.get("gpu")) and not (options.layers or options.hidden)
    judged = options.names != ("gpu",) or bounds_model
    results = Results(measurements, options.dtype, described, judged)
    text = json.dumps(results.as_json(), indent=1)
    if options.json == "-":
        print(text)
        return 0
    if options.names == ("nccl",):
        from minidist.bench.nccl import as_text

        print(as_text(measurements, options))
    else:
        print(results.as_text())
    if options.json:
        Path(options.json).write_text(text + "\n")
    return 0


def run_workers(
    launch: str, options: Options, argv: list[str]
) -> tuple[dict[str, object], list[Measurement]]:
    """Run one launch, or measure `here`; return the machine as described there, and the
    measurements.

    Raises
    ------
    LaunchError
        If it cannot be started, or fails.
    """
    if launch == "here":
        from minidist.bench.gpu import one_rank  # which imports torch
        from minidist.bench.worker import collected, machine

        with one_rank(options.device) if options.names == ("gpu",) else nullcontext(init()) as comm:
            return machine(), collected(Setting(options, launch, comm))
    if launch == "nccl":
        from minidist.bench.nccl import on_gpus

        start, env = on_gpus(options)
    else:
        mpirun = find_mpirun()
        start, env = [mpirun.path, "-n", str(options.ranks), sys.executable], environment(mpirun)
        env |= {"OMP_NUM_THREADS": "1"} | (KEEP_MEMORY if launch == "tuned" else {})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "measured")
        outcome = run_job(
            [*start, "-m", "minidist.bench.worker", launch, str(file), *argv], env=env
        )
        if outcome.returncode or not file.exists():
            raise LaunchError(
                f"the {launch} launch ended with status {outcome.returncode}; nothing is reported"
            )
        found: tuple[dict[str, object], list[Measurement]] = pickle.loads(file.read_bytes())
    return found
