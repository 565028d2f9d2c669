"""A training step through a pipeline: minidist's schedules and torch's, and the serial step over
the same microbatches.

    serial                forward and backward of every microbatch, AdamW; both ranks do it at once, each by itself
    gpipe, 1f1b, zb-h1    minidist.full.pipeline.executor, one stage a rank
    torch gpipe, 1f1b     torch.distributed.pipelining over gloo, the same stages

With p stages and m microbatches no schedule without zero bubbles takes less than (m + p - 1)/(m p)
of the serial step.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minidist.bench.measure import Run
from minidist.bench.options import LAYERS
from minidist.bench.subject import Case, Setting, subject
from minidist.bench.training import BATCH, TIME, adamw_step, forward_backward, gpt, text
from minidist.full.comm import Communicator
from minidist.full.model import cross_entropy_sum
from minidist.full.pipeline.communicate import with_communication
from minidist.full.pipeline.executor import Pipeline
from minidist.full.pipeline.schedules import plan
from minidist.full.pipeline.stage import balance, take_stages

MICROBATCHES = 8


@subject(peers=("serial", "torch gpipe", "torch 1f1b"))
def pipeline(setting: Setting) -> Iterator[Case]:
    """Seconds of a training step at every width, all competitors with the same microbatches."""
    comm, tokens = setting.comm, text()
    for hidden in setting.options.hidden:
        runs = {"serial": serial(gpt(hidden), tokens)}
        runs |= {name: ours(hidden, name, comm, tokens) for name in ("gpipe", "1f1b", "zb-h1")}
        if setting.gloo is not None:
            runs |= {
                f"torch {name}": by_torch(hidden, name, comm, tokens) for name in ("gpipe", "1f1b")
            }
        yield Case(f"D={hidden}, {MICROBATCHES} microbatches", runs)


def stage_of(hidden: int, comm: Communicator) -> nn.Module:
    """Return this rank's stage, one of as many as there are ranks."""
    return take_stages(gpt(hidden), balance([1.0] * LAYERS, comm.size), [comm.rank])[comm.rank]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return a microbatch's part of the mean over the batch."""
    return cross_entropy_sum(logits, targets) / (BATCH * TIME)


def serial(model: nn.Module, tokens: Tensor) -> Run:
    """Return a step without a pipeline."""
    parts = [forward_backward(model, part, BATCH * TIME) for part in tokens.chunk(MICROBATCHES)]
    return adamw_step(model, lambda: [part() for part in parts])


def ours(
    hidden: int,
    name: str,
    comm: Communicator,
    tokens: Tensor,
) -> Run:
    """Return minidist's step."""
    stage = stage_of(hidden, comm)
    schedule = with_communication(plan(name, comm.size, MICROBATCHES))
    carried = torch.empty(BATCH // MICROBATCHES, TIME, hidden, device="meta")
    executor = Pipeline(
        {comm.rank: stage},
        comm,
        schedule,
        loss_of,
        lambda _: carried,
    )
    inputs, targets = (part.chunk(MICROBATCHES) for part in (tokens[:, :-1], tokens[:, 1:]))
    return adamw_step(stage, partial(executor.step, inputs, targets))


def by_torch(
    hidden: int,
    name: str,
    comm: Communicator,
    tokens: Tensor,
) -> Run:
    """Return torch's step."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    module = stage_of(hidden, comm)
    stage = PipelineStage(module, comm.rank, comm.size, torch.device("cpu"))
    kind: Any = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[name]
    schedule = kind(stage, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    inputs = [tokens[:, :-1]] if comm.rank == 0 else []
    targets = tokens[:, 1:] if comm.rank == comm.size - 1 else None
    return adamw_step(module, lambda: schedule.step(*inputs, target=targets))
