"""A training step through a pipeline: minidist's schedules and torch's, and the serial step over the same microbatches.

    serial                forward and backward of every microbatch on one rank, AdamW; both ranks at once, each alone
    gpipe, 1f1b, zb-h1    minidist.parallel.pipeline.executor, one stage a rank
    torch gpipe, 1f1b     torch.distributed.pipelining over gloo, the same stages

With p stages and m microbatches no schedule without zero bubbles takes less than (m + p - 1)/(m p) of the serial step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minidist.bench.measure import Measurement, Run, alternate
from minidist.bench.options import Options
from minidist.bench.subjects.training import COMPUTING, LAYERS, ROUNDS
from minidist.model import GPT, GPTConfig
from minidist.parallel.pipeline.communicate import with_communication
from minidist.parallel.pipeline.executor import Pipeline
from minidist.parallel.pipeline.schedules import plan
from minidist.parallel.pipeline.stage import balance, take_stages

if TYPE_CHECKING:
    from minidist.comm import Communicator

MICROBATCHES = 8
BATCH, TIME = COMPUTING


def bench_pipeline(options: Options, launch: str, comm: Communicator, gloo: Any) -> Iterator[Measurement]:
    """Measure seconds of a step at every width."""
    tokens = torch.randint(256, (BATCH, TIME + 1), generator=torch.Generator().manual_seed(0))
    for hidden in options.hidden:
        runs = {"serial": serial(build(hidden), tokens)}
        runs |= {name: ours(hidden, name, comm, tokens) for name in ("gpipe", "1f1b", "zb-h1")}
        if gloo is not None:
            runs |= {f"torch {name}": by_torch(hidden, name, comm, tokens) for name in ("gpipe", "1f1b")}
        case = f"D={hidden}, {MICROBATCHES} microbatches"
        for name, seconds in alternate(runs, comm, options.rounds or ROUNDS).items():
            yield Measurement("pipeline", case, name, launch, seconds, ranks=comm.size)


def build(hidden: int) -> GPT:
    """Return the serial model."""
    return GPT(GPTConfig(vocabulary=256, layers=LAYERS, hidden=hidden, heads=4, sequence=TIME))


def stage_of(hidden: int, comm: Communicator) -> nn.Module:
    """Return this rank's stage, one of as many as there are ranks."""
    return take_stages(build(hidden), balance([1.0] * LAYERS, comm.size), [comm.rank])[comm.rank]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return a microbatch's part of the mean over the batch."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (BATCH * TIME)


def serial(model: nn.Module, tokens: Tensor) -> Run:
    """Return a step without a pipeline."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        for part in tokens.chunk(MICROBATCHES):
            loss_of(model(part[:, :-1]), part[:, 1:]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def ours(hidden: int, name: str, comm: Communicator, tokens: Tensor) -> Run:
    """Return minidist's step."""
    stage = stage_of(hidden, comm)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-4)
    schedule = with_communication(plan(name, comm.size, MICROBATCHES))
    carried = torch.empty(BATCH // MICROBATCHES, TIME, hidden, device="meta")
    pipeline = Pipeline({comm.rank: stage}, comm, schedule, loss_of, lambda _: carried)
    parts = tokens.chunk(MICROBATCHES)
    inputs, targets = [part[:, :-1] for part in parts], [part[:, 1:] for part in parts]

    def step() -> None:
        optimizer.zero_grad()
        pipeline.step(inputs, targets)
        optimizer.step()

    return step


def by_torch(hidden: int, name: str, comm: Communicator, tokens: Tensor) -> Run:
    """Return torch's step."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    module = stage_of(hidden, comm)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    stage = PipelineStage(module, comm.rank, comm.size, torch.device("cpu"))
    kind: Any = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name]
    schedule = kind(stage, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    last = comm.rank == comm.size - 1

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*([tokens[:, :-1]] if comm.rank == 0 else []), target=tokens[:, 1:] if last else None)
        optimizer.step()

    return step
