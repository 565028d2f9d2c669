"""What every rank of a launch does: `python -m minidist.bench.worker LAUNCH FILE NAME [options]`, under mpirun.

Rank 0 writes what was measured to FILE, as JSON.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minidist.bench.machine import machine
from minidist.bench.measure import Measurement
from minidist.bench.options import Options, parse
from minidist.bench.probe import bench_copy
from minidist.bench.subjects.collective import bench_collective, bench_p2p
from minidist.comm import init

if TYPE_CHECKING:
    from minidist.comm import Communicator


def main(launch: str, file: str, argv: list[str]) -> None:
    """Measure, with a line of progress on standard error for each case."""
    options, comm = parse(argv), init()
    without = (("copy",), ("recompute",), ("adamw",), ("checkpoint",))
    wanted = "gloo" in options.peers and launch == "shipped" and options.names not in without
    gloo = start_gloo(comm) if wanted else None
    measurements, last = [], ("", "")
    for measurement in measure(options, launch, comm, gloo):
        measurements.append(measurement)
        case = (measurement.bench, measurement.case)
        if comm.rank == 0 and case != last:
            sys.stderr.write(f"{launch}: {measurement.bench} {measurement.case}\n")
            sys.stderr.flush()
        last = case
    if comm.rank == 0:
        rows = [asdict(measurement) for measurement in measurements]
        Path(file).write_text(json.dumps({"machine": machine(), "measurements": rows}))
    if gloo is not None:
        gloo.destroy_process_group()


def measure(options: Options, launch: str, comm: Communicator, gloo: Any) -> Iterator[Measurement]:
    """Yield what this launch measures: the tuned one only what MPI has a peer for."""
    yield from bench_copy("before", launch, comm)
    if "p2p" in options.names and launch == "shipped":
        yield from bench_p2p(options, launch, comm, gloo)
    for operation in options.collectives:
        yield from bench_collective(operation, options, launch, comm, gloo)
    if "ddp" in options.names and launch == "shipped":
        from minidist.bench.subjects.training import bench_training

        yield from bench_training(options, launch, comm, gloo)
    if "zero" in options.names and launch == "shipped":
        from minidist.bench.subjects.zero import bench_zero

        yield from bench_zero(options, launch, comm, gloo)
    if "pipeline" in options.names and launch == "shipped":
        from minidist.bench.subjects.pipeline import bench_pipeline

        yield from bench_pipeline(options, launch, comm, gloo)
    if "tensor" in options.names and launch == "shipped":
        from minidist.bench.subjects.tensor import bench_tensor

        yield from bench_tensor(options, launch, comm, gloo)
    if "checkpoint" in options.names and launch == "shipped":
        from minidist.bench.subjects.checkpoint import bench_checkpoint

        yield from bench_checkpoint(options, launch, comm)
    if "recompute" in options.names and launch == "shipped":
        from minidist.bench.subjects.recompute import bench_recompute

        yield from bench_recompute(options, launch, comm)
    if "adamw" in options.names and launch == "shipped":
        from minidist.bench.subjects.adamw import bench_adamw

        yield from bench_adamw(options, launch, comm)
    if options.names != ("copy",):
        yield from bench_copy("after", launch, comm)


def start_gloo(comm: Communicator) -> Any:
    """Return torch.distributed with a gloo group of the same ranks, on this machine's loopback."""
    import torch.distributed as distributed

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = comm.roll_call(probe.getsockname()[1])[0]  # rank 0's
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=comm.rank, world_size=comm.size)
    return distributed


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
