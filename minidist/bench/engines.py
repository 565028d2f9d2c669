"""`python -m minidist bench engines`: how long this machine takes for programs of many simulated
ranks, engine by engine. The tensors are on `meta`, the time on the virtual clock is the same.

    ring        an all-reduce of 1 GiB, 2 (P - 1) messages a rank
    recursive   the same in 2 log2 P messages
    gpt         a training step of a GPT, dp x pp x tp (`--step 8x8x8`), which needs autograd

Each runs in a process of its own. Wall time is said beside the CPU's: one rank runs at a time, so on
a quiet machine they are nearly the same.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import minidist
from minidist.bench.options import check_writable
from minidist.draw.table import aligned
from minidist.full.comm import Cluster, Communicator
from minidist.full.comm.threads_wire.carriers.engines import ENGINES
from minidist.full.launch.parser import Parser, flag_of
from minidist.full.mesh import Layout, Mesh
from minidist.full.options import RANKS

ELEMENTS = 1 << 28  # of 4 bytes: 1 GiB
PROGRAMS = ("ring", "recursive")
MICROBATCHES, LENGTH = 8, 128  # of the GPT's step
LAYERS = HEADS = 8
PEAK = 989e12  # operations a second


class Measured(NamedTuple):
    """One program on one engine: seconds on this machine, and on the virtual clock."""

    program: str
    ranks: int
    engine: str
    wall: float
    cpu: float
    clock: float


def main(argv: Sequence[str]) -> int:
    """Measure, and print a table; return 0."""
    parser = Parser(prog="minidist bench engines", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--ranks",
        type=flag_of(int, RANKS),
        nargs="+",
        default=[64, 256],
        help="of the all-reduce (64 256)",
    )
    parser.add_argument(
        "--programs",
        nargs="*",
        choices=PROGRAMS,
        default=list(PROGRAMS),
        help="its algorithms (both)",
    )
    parser.add_argument(
        "--step",
        default="",
        metavar="DPxPPxTP",
        help="measure a step of a GPT as well",
    )
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=ENGINES,
        default=list(ENGINES),
        help="which (all)",
    )
    parser.add_argument("--json", default="", help="file for the figures, or -")
    asked = parser.parse_args(argv)
    check(parser, asked)
    cases: list[tuple[str, int | str]] = []
    for name in asked.programs:
        cases += [(name, ranks) for ranks in asked.ranks]
    if asked.step:
        cases.append(("gpt", asked.step))
    importlib.import_module("torch")  # whose absence is told before a process is started

    found = []
    for name, size in cases:
        for engine in asked.engines:
            with get_context("spawn").Pool(1) as alone:
                found.append(alone.apply(measure, (name, size, engine)))
            print(*row(found[-1]), sep="  ", file=sys.stderr)
    if asked.json:
        text = json.dumps([each._asdict() for each in found], indent=1)
        print(text) if asked.json == "-" else Path(asked.json).write_text(text + "\n")
    if asked.json != "-":
        head = ("program", "ranks", "engine", "wall", "CPU", "virtual clock")
        print(aligned(head, [row(each) for each in found]))
    return 0


def check(parser: Parser, asked: Namespace) -> None:
    """Refuse what would fail, perhaps after minutes."""
    check_writable(parser, asked.json)
    if not asked.programs and not asked.step:
        parser.error("nothing to measure: give --programs, or --step")
    if not asked.step:
        return
    parts = asked.step.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        parser.error(f"--step {asked.step}: write dp x pp x tp, as in 8x8x8")
    dp, pp, tp = map(int, parts)
    if pp > LAYERS or HEADS % tp:
        parser.error(
            f"--step {asked.step}: the model has {LAYERS} layers and {HEADS} heads, so pp is at "
            f"most {LAYERS}, and tp divides {HEADS}"
        )
    if not RANKS.holds(dp * pp * tp):
        parser.error(f"--step {asked.step}: {dp * pp * tp:,} ranks; they must be {RANKS.words}")


def row(found: Measured) -> tuple[str, ...]:
    """Return a row of the table."""
    return (
        found.program,
        f"{found.ranks:,}",
        found.engine,
        f"{found.wall:.2f} s",
        f"{found.cpu:.2f} s",
        f"{found.clock:.9g} s",
    )


def measure(name: str, size: int | str, engine: str) -> Measured:
    """Run a program once; torch is imported before."""
    if name == "gpt":
        dp, pp, tp = map(int, str(size).split("x"))
        layout = Layout(dp=dp, pp=pp, tp=tp)
        ranks, program = layout.size, training_step(layout)
    else:
        ranks, program = int(size), all_reduced(name)
    began, busy = time.perf_counter(), time.process_time()
    cluster = Cluster.h100(nodes=-(-ranks // 8))
    clocks = minidist.run(program, ranks, cluster=cluster, engine=engine, limit=3600)
    wall, cpu = time.perf_counter() - began, time.process_time() - busy
    return Measured(name, ranks, engine, wall, cpu, max(clocks))


def all_reduced(algorithm: str) -> Callable[[Communicator], float]:
    """Return a program that all-reduces 1 GiB."""
    import torch

    from minidist.full.collectives import all_reduce

    def program(comm: Communicator) -> float:
        all_reduce(torch.empty(ELEMENTS, device="meta"), comm, algorithm=algorithm)
        return comm.clock()

    return program


def training_step(layout: Layout) -> Callable[[Communicator], float]:
    """Return a program that trains a GPT of eight layers for one step of 8 microbatches."""
    import torch

    from minidist.full import Recipe, parallelize
    from minidist.full.meta import Computing
    from minidist.full.model import GPT, GPTConfig, Where
    from minidist.full.trainer.start import carried_of, loss_of

    sizes = GPTConfig(
        vocabulary=1024,
        layers=LAYERS,
        hidden=256,
        heads=HEADS,
        intermediate=512,
        sequence=LENGTH,
    )
    recipe = Recipe(microbatches=MICROBATCHES, bucket_mib=0.25)

    def program(comm: Communicator) -> float:
        mesh, model = Mesh(comm, layout), GPT(sizes, dtype=torch.bfloat16, device="meta")
        loss, carried = loss_of(model, mesh), carried_of(model, mesh, recipe)
        parallel = parallelize(model, mesh, recipe, loss, carried)
        groups = [{"params": list(parallel.model.parameters())}]
        optimizer = parallel.optimizer(torch.optim.SGD, groups, elementwise=True, lr=0.1)
        some = torch.zeros(2, LENGTH, dtype=torch.long, device="meta")
        tokens, places = [some] * MICROBATCHES, [Where(positions=some[0])] * MICROBATCHES
        began = comm.clock()
        with Computing(comm, PEAK):
            parallel.zero_grad()
            parallel.step(tokens, tokens, places)
            optimizer.step()
        return comm.clock() - began

    return program
