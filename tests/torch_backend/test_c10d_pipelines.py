"""torch's pipelines on simulated ranks, by its own schedules and, in its runtime, by our plans."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from c10d_training import BYTES, OPTIMIZERS, RANKS, STEPS, Meter, assert_same, on_ranks, whole
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from minidist.full.comm import Communicator
from minidist.full.pipeline import plan, read_plan

BATCH, WIDTH, MICROBATCHES = 16, 32, 8
STRAIGHT, LOOPED = [*range(RANKS)], [*range(RANKS)] * 2
V_SHAPED = STRAIGHT + STRAIGHT[::-1]
TORCHS = {  # the rank of each stage
    "GPipe": STRAIGHT,
    "1F1B": STRAIGHT,
    "Interleaved1F1B": LOOPED,
    "LoopedBFS": LOOPED,
    "InterleavedZeroBubble": LOOPED,
    "ZBVZeroBubble": V_SHAPED,
    "DualPipeV": V_SHAPED,
}
OURS = {
    "zb-h1": STRAIGHT,
    "interleaved": LOOPED,
    "zb-v": V_SHAPED,
}

Found = dict[str, tuple[dict[int, list[Tensor]], list[float], list[int]]]


def layers(count: int) -> nn.Sequential:
    torch.manual_seed(0)
    parts = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(count))
    return nn.Sequential(*parts).double()


def whole_batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    first, second = (
        torch.randn(BATCH, WIDTH, generator=draw, dtype=torch.float64) for _ in range(2)
    )
    return first, second


def torchs_schedule(stages: list[PipelineStage], name: str) -> Any:
    chosen: Any = stages if len(stages) > 1 else stages[0]
    return getattr(schedules, f"Schedule{name}")(chosen, MICROBATCHES, loss_fn=nn.MSELoss())


def of_our_plan(stages: list[PipelineStage], file: Path) -> Any:
    runtime = schedules._PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=nn.MSELoss())
    runtime._load_csv(str(file), "compute_only")
    return runtime


def rank_trains(comm: Communicator, rank_of: list[int], schedule: Callable[..., Any]) -> Found:
    """Return for each optimizer the parameters of each stage here, the losses of the last step,
    and the bytes of each step.
    """
    dist.init_process_group("minidist")
    own, last = [s for s, rank in enumerate(rank_of) if rank == comm.rank], len(rank_of) - 1
    found: Found = {}
    for name, make in OPTIMIZERS.items():
        model, cpu = layers(len(rank_of)), torch.device("cpu")
        pipeline = schedule([PipelineStage(model[s], s, len(rank_of), cpu) for s in own])
        optimizer = make([p for s in own for p in model[s].parameters()])
        meter = Meter(comm)
        losses: list[Tensor] = []
        for step in range(STEPS):
            inputs, targets = whole_batch(step)
            optimizer.zero_grad()
            pipeline.step(
                *([inputs] if 0 in own else []),
                **({"target": targets, "losses": losses} if last in own else {}),
            )
            optimizer.step()
            meter()
        parameters = {s: whole(model[s].parameters()) for s in own}
        found[name] = parameters, [loss.item() for loss in losses], meter.steps
    return found


def assert_trains(rank_of: list[int], schedule: Callable[..., Any]) -> None:
    results = on_ranks(partial(rank_trains, rank_of=rank_of, schedule=schedule))
    for name, make in OPTIMIZERS.items():
        model = layers(len(rank_of))
        optimizer = make(model.parameters())
        for step in range(STEPS):
            inputs, targets = whole_batch(step)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
        for rank, found in enumerate(results):
            parameters, losses, bytes = found[name]
            for stage, own in parameters.items():
                assert_same(own, whole(model[stage].parameters()))
            if rank == rank_of[-1]:
                assert sum(losses) / MICROBATCHES == pytest.approx(loss.item(), abs=1e-12)
            # each rank that a batch leaves sends its activations, and back their gradients
            leaves = [pair for pair in pairwise(rank_of) if pair[0] != pair[1]]
            ends = sum((rank == here) + (rank == there) for here, there in leaves)
            sent = ends * BATCH * WIDTH * BYTES
            assert bytes[1:] == [sent] * (STEPS - 1)
            assert 0 <= bytes[0] - sent < 2000  # in the first step stages tell their shapes


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_schedules_give_the_serial_model_and_send_each_activation_once(name: str) -> None:
    assert_trains(TORCHS[name], partial(torchs_schedule, name=name))


@pytest.mark.parametrize("name", OURS)
def test_torchs_runtime_trains_by_our_plans(name: str, tmp_path: Path) -> None:
    ours = plan(name, RANKS, MICROBATCHES, chunks=2 if OURS[name] == LOOPED else 1)
    assert list(ours.rank_of) == OURS[name]
    assert read_plan(ours.csv()) == ours
    file = tmp_path / "plan.csv"
    file.write_text(ours.csv())
    assert_trains(OURS[name], partial(of_our_plan, file=file))
