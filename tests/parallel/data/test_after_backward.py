"""Gradients that are summed after backward: what is sent, and when. That a model trains as on one
rank stands in VARIANTS.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import minidist
from minidist.full import DataParallel, NaiveDataParallel
from minidist.full.comm import Communicator
from minidist.full.ddp.after_backward import PlainDataParallel, reduce_gradients
from minidist.full.trace import Trace

LAYERS, WIDTH = 5, 121  # which neither 2 nor 3 divides


@pytest.mark.parametrize("ranks", (1, 2, 3))
@pytest.mark.parametrize(
    ("variant", "expected"), ((PlainDataParallel, 3), (NaiveDataParallel, LAYERS))
)
def test_one_all_reduce_a_bucket_and_only_after_backward(
    variant: type[DataParallel], expected: int, ranks: int
) -> None:
    def program(comm: Communicator) -> tuple[int, int]:
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        options = {"bucket_bytes": 2 * WIDTH * WIDTH * 4} if variant is PlainDataParallel else {}
        model = variant(layers, comm, op="sum", **options)  # type: ignore[arg-type]
        before = comm.traffic.bytes
        model(torch.ones(2, WIDTH)).sum().backward()
        during = comm.traffic.bytes - before
        model.synchronize()
        return during, comm.traffic.bytes - before

    trace = Trace()
    sent = minidist.run(program, ranks, trace=trace)
    assert [during for during, _ in sent] == [0] * ranks
    assert sum(after for _, after in sent) == 2 * (ranks - 1) * LAYERS * WIDTH * WIDTH * 4
    reductions = [event for event in trace.events if event.name.startswith("all_reduce")]
    assert len(reductions) == expected * ranks * (ranks > 1)


def test_reduced_gradients_are_sums_that_lie_end_to_end_and_no_gradient_counts_as_zero() -> None:
    def program(comm: Communicator) -> None:
        first, second = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(5))
        first.grad = torch.full((2, 3), comm.rank + 1.0).T  # no flat memory
        if comm.rank == 1:
            second.grad = torch.arange(5.0)
        reduce_gradients([[second, first]], comm, "sum")
        assert torch.equal(first.grad, torch.full((3, 2), 6.0)) and torch.equal(
            second.grad, torch.arange(5.0)
        )
        assert first.grad.untyped_storage().data_ptr() == second.grad.untyped_storage().data_ptr()

    minidist.run(program, 3)
