"""The plain page of pipelines: the plan's order, the serial gradients, 2 messages a microbatch and
cut, few graphs.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from data_parallel import build
from test_pipeline import DEEP, ROWS, data, loss
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import minidist
from minidist.full.comm import Communicator
from minidist.full.pipeline import plan
from minidist.full.pipeline.plain import one_forward_one_backward
from minidist.full.pipeline.stage import balance, take_stages


@cache
def serial(count: int) -> tuple[dict[str, Tensor], float]:
    """Return the gradients of the first microbatches, and the sum of their losses."""
    model = build(DEEP, 0)
    tokens, where = data(0)
    losses = [
        loss(model(t[:, :-1], w), t[:, 1:])
        for t, w in zip(tokens[:count], where[:count], strict=True)
    ]
    total = torch.stack(losses).sum()
    total.backward()  # type: ignore[no-untyped-call]
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, total.item()


class Watched:
    """A stage that notes what it does, and counts the microbatches of which autograd keeps
    something.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.peak = module, 0
        self.done: list[str] = []
        self.saved: list[StorageWeakRef] = []
        for name, part in module.named_modules():
            if name.endswith("mlp.down"):
                down = part  # of the last layer
        down.register_forward_pre_hook(
            lambda _, x: self.saved.append(StorageWeakRef(x[0].untyped_storage()))
        )

    def __call__(self, x: Tensor) -> Tensor:
        microbatch = len(self.saved)
        y: Tensor = self.module(x, data(0)[1][microbatch])
        self.done.append(f"F{microbatch}")
        y.register_hook(lambda _: self.done.append(f"B{microbatch}"))
        self.peak = max(self.peak, sum(not reference.expired() for reference in self.saved))
        return y


@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (2, 8), (3, 3), (4, 8), (4, 2)])
def test_it_is_the_plan_and_gives_the_serial_gradients(ranks: int, count: int) -> None:
    expected, losses = serial(count)
    schedule = plan("1f1b", ranks, count)

    def program(comm: Communicator) -> tuple[set[str], float, int, int]:
        model = build(DEEP, 0)
        parts = balance([1.0] * DEEP.layers, ranks)
        stage = Watched(take_stages(model, parts, [comm.rank])[comm.rank])
        tokens = data(0)[0][:count]
        hidden = [torch.zeros_like(t) if comm.rank else t for t in tokens]  # others look at shapes

        def carried(x: Tensor) -> Tensor:
            return torch.empty(*x.shape, DEEP.hidden, dtype=torch.float64)

        inputs, targets = [t[:, :-1] for t in hidden], [t[:, 1:] for t in tokens]
        total = one_forward_one_backward(stage, comm, inputs, targets, loss, carried)
        assert stage.done == [
            f"{action.kind}{action.microbatch}" for action in schedule.actions[comm.rank]
        ]
        assert stage.peak == min(ranks - comm.rank, count)
        assert all(reference.expired() for reference in stage.saved)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for name, gradient in found.items():
            assert (gradient - expected[name]).abs().max() <= 1e-9 * expected[name].abs().max(), (
                name
            )
        return set(found), total, comm.traffic.messages, comm.traffic.bytes

    names, totals, messages, sent = zip(*minidist.run(program, ranks), strict=True)
    assert set().union(*names) == expected.keys()
    assert totals[-1] == pytest.approx(losses, rel=1e-12) and not any(totals[:-1])
    assert sum(messages) == (ranks - 1) * 2 * count
    # positions, channels, float64
    assert sum(sent) == (ranks - 1) * 2 * sum(ROWS[:count]) * 8 * DEEP.hidden * 8
