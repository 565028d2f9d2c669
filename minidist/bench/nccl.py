"""`python -m minidist bench nccl`: collectives on GPU memory, by NCCL and by minidist, in the
columns of nccl-tests.

    torchrun ─▶ worker 0, GPU 0     native (NCCL itself), ring, recursive, ...  take turns: A B C A B C ...
             └▶ worker 1, GPU 1     every rank waits for its GPU at the end of a turn

    size    bytes of the whole buffer          count    elements of it, or of a rank's shard where it is cut
    algbw   size / time                        busbw    algbw times the share of the bytes that cross a rank's link

`--device cpu` does the same over gloo, to try it. (NVIDIA's nccl-tests, doc/PERFORMANCE.md.)
"""

from collections.abc import Iterable
from itertools import groupby

import numpy as np
import torch

from minidist.bench.measure import Measurement
from minidist.bench.options import Options
from minidist.draw.table import aligned
from minidist.full.comm import LaunchError
from minidist.full.comm.torch_wire.gpus import SHARING, ranks_per_gpu, share_gpus
from minidist.full.launch.mpirun import environment, torchrun

HEADER = ("by", "size (B)", "count", "type", "redop", "time (us)", "algbw (GB/s)", "busbw (GB/s)")
TYPES = {"float16": "half", "float32": "float", "float64": "double"}  # as nccl-tests call them
# of which each rank has the whole buffer; these work in place
WHOLE = ("all_reduce", "broadcast", "reduce")


def on_gpus(options: Options) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts the ranks, without their program, and its environment.

    Raises
    ------
    LaunchError
        If there are fewer GPUs than these ranks need, or ranks are to share GPUs and cannot.
    """
    each, gpus = ranks_per_gpu(), torch.cuda.device_count()
    cpu = {"CUDA_VISIBLE_DEVICES": "", SHARING: "1"} if options.device == "cpu" else {}
    if not cpu and each > 1:
        share_gpus(each, gpus, options.ranks)  # complains in this process, and not in each rank
    elif not cpu and gpus < options.ranks:
        raise LaunchError(
            f"--ranks {options.ranks} need a GPU each, and there are {gpus}: use fewer, "
            f"{SHARING}, or --device cpu"
        )
    return torchrun(options.ranks), environment() | cpu


def as_text(measurements: Iterable[Measurement], options: Options) -> str:
    """Return a table of each collective."""
    parts = []
    for operation, rows in groupby(measurements, lambda row: row.bench):
        how = "in place" if operation in WHOLE else "out of place"
        table = aligned(HEADER, [columns(row, options.dtype) for row in rows])
        parts.append(f"{operation}, {options.ranks} ranks, {how}\n{table}")
    if options.device == "cuda" and (each := ranks_per_gpu()) > 1:
        parts.append(f"{each} ranks share a GPU: not a measure of speed")
    return "\n\n".join(parts)


def columns(row: Measurement, dtype: str) -> list[str]:
    """Return the cells of one measurement."""
    count = row.bytes // np.dtype(dtype).itemsize // (1 if row.bench in WHOLE else row.ranks)
    reduction = "sum" if "reduce" in row.bench else "none"
    speeds = row.bytes / row.median, row.bus_bandwidth or 0.0
    numbers = (f"{row.median * 1e6:.2f}", *(f"{speed / 1e9:.4g}" for speed in speeds))
    return [
        row.competitor,
        str(row.bytes),
        str(count),
        TYPES.get(dtype, dtype),
        reduction,
        *numbers,
    ]
