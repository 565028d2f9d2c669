"""Where memory stays, sharded models call prepared collectives: from the second step on nothing is
chosen and no result allocated, and nobody sees it from outside.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from data_parallel import CONFIG, Case, wrap

import minidist
from minidist import Cluster, Communicator
from minidist.full import DataParallel, ZeRO1
from minidist.full.collectives import operations
from minidist.full.comm import Link
from minidist.full.model import GPT, cross_entropy_sum
from minidist.full.trace import Trace

CASES = ((ZeRO1, "cpu", {}),)
EACH = pytest.mark.parametrize(
    ("kind", "device", "options"),
    CASES,
    ids=[kind.__name__ for kind, *_ in CASES],
)
NODES = Cluster(Link(1e-6, 1e9), Link(1e-5, 1e8), ranks_per_node=2)


def train(comm: Communicator, kind: type[DataParallel], device: str, options: Any) -> Any:
    """Yield after each of three steps: what was sent by then, the time, and the parameters."""
    model = GPT(CONFIG, torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    wrapped = wrap(model, comm, Case(kind), **options)
    optimizer = wrapped.optimizer(torch.optim.AdamW)  # type: ignore[operator]
    tokens = torch.zeros(2, 9, dtype=torch.int64, device=device)
    for _ in range(3):
        cross_entropy_sum(wrapped(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        values = [p.tolist() for p in model.parameters() if p.device.type == "cpu"]
        yield comm.traffic.messages, comm.traffic.bytes, comm.clock(), values


@EACH
def test_a_third_step_chooses_nothing_and_allocates_no_results(
    kind: type[DataParallel], device: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("find", "new_rows"):
        genuine = getattr(operations, name)

        def counted(*given: Any, name: str = name, genuine: Any = genuine) -> Any:
            calls.append(name)
            return genuine(*given)

        monkeypatch.setattr(operations, name, counted)

    def program(comm: Communicator) -> list[int]:
        after = []
        for _ in train(comm, kind, device, options):
            comm.all_gather_object(None)
            after.append(len(calls))
            comm.all_gather_object(None)
        return after

    first, second, third = minidist.run(program, 4)[0]
    assert first > 0 and second == third == first


@EACH
def test_values_bytes_moments_and_events_are_those_of_plain_calls(
    kind: type[DataParallel], device: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen() -> tuple[Any, Any]:
        trace = Trace()
        program = lambda comm: list(train(comm, kind, device, options))  # noqa: E731
        result = minidist.run(program, 4, cluster=NODES, trace=trace)
        return result, [replace(event, line="") for event in sorted(trace.events, key=repr)]

    prepared = seen()
    monkeypatch.setattr("minidist.full.collectives.prepared.handle.PreparedLater.__call__", plainly)
    assert prepared == seen() and len(prepared[1]) > 100


def plainly(self: Any) -> Any:
    prepare = self._prepare
    return getattr(operations, prepare.args[0])(*prepare.args[1:], **prepare.keywords)
