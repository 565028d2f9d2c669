"""Rings against trees: an all-reduce by each algorithm, on a modelled cluster with a virtual clock."""

from __future__ import annotations

from functools import partial

import torch

import minidist
from figures.shapes import BLUE, Block, Choice, Figure, Kind, Row, State
from minidist import Cluster
from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator

ALGORITHMS = ("ring", "recursive", "tree", "hierarchical", "central")
SIZES = {"1 KiB": 2**10, "64 KiB": 2**16, "1 MiB": 2**20, "16 MiB": 2**24, "1 GiB": 2**30}
PER_NODE = 8


def draw(size: str, ranks: str) -> State:
    """Run an all-reduce of `size` on so many H100, eight a node, by each algorithm."""
    count = int(ranks)
    cluster = Cluster.h100(nodes=-(-count // PER_NODE))
    found = {}
    for algorithm in ALGORITHMS:
        if algorithm == "hierarchical" and count <= PER_NODE:
            continue  # there is one level
        reduce = partial(program, elements=SIZES[size] // 4, algorithm=algorithm)
        told = minidist.run(reduce, ranks=count, cluster=cluster)
        found[algorithm] = max(time for time, _ in told), max(sent for _, sent in told)
    fastest = min(found, key=lambda name: found[name][0])
    rows = []
    for name, (seconds, sent) in found.items():
        note = f"{shown(seconds)}, a rank sends at most {sent:,} bytes"
        label = f"{name} (fastest)" if name == fastest else name
        rows.append(Row(label, (Block(round(1e6 * seconds, 3), 0),), note))
    slowest = max(seconds for seconds, _ in found.values())
    said = f"{fastest} is fastest: {shown(found[fastest][0])}"
    return State(f"{said}.", tuple(rows), round(1e6 * slowest, 3))


def program(comm: Communicator, elements: int, algorithm: str) -> tuple[float, int]:
    """Reduce numbers that are not there; return the seconds and the bytes that this rank sent."""
    all_reduce(torch.empty(elements, device="meta"), comm, algorithm=algorithm)
    return comm.clock(), comm.traffic.bytes


def shown(seconds: float) -> str:
    """Return a time as people say it: `12.3 µs`, `4.21 ms`."""
    return f"{1e6 * seconds:.1f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


FIGURE = Figure(
    name="collectives",
    title="Rings against trees",
    question="Which all-reduce is fastest for this size, on so many GPUs?",
    choices=(
        Choice("size", tuple(SIZES), "1 MiB", slider=True),
        Choice("GPUs", ("2", "4", "8", "16", "32", "64"), "16", slider=True),
    ),
    kinds=(Kind("time", *BLUE),),
    unit="µs",
    digits=1,
    draw=draw,
)
