"""The trace, the file for Perfetto and the player show a program of torch as they show ours."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from c10d_training import BYTES, OPTIMIZERS, RANKS, STEPS, Meter, model, numbers, on_ranks, train
from test_c10d_models import STRATEGIES

from minidist import Trace
from minidist.draw.perfetto import entries
from minidist.draw.player import player
from minidist.draw.recording import Watching, record
from minidist.full.comm import Communicator
from minidist.full.trace.events import COMMUNICATION, Event, messages

SIZES = [parameter.numel() * BYTES for parameter in model().parameters()]
LAYERS = [weight + bias for weight, bias in zip(SIZES[::2], SIZES[1::2], strict=True)]
# in a step, as the formula says, by operation and bytes
EXPECTED = {
    "DDP": Counter({("all_reduce", numbers() * BYTES): 1}),
    "fully_shard": Counter(
        [("all_gather", bytes) for bytes in LAYERS * 2] + [("reduce_scatter", b) for b in LAYERS]
    ),
}


def last_step(comm: Communicator, name: str, marks: list[float]) -> int:
    dist.init_process_group("minidist")
    net, loss = STRATEGIES[name].build(comm)
    meter = Meter(comm)
    train(net, OPTIMIZERS["sgd"](net.parameters()), meter, loss)
    marks[comm.rank] = meter.clock[-2]
    return meter.steps[-1]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_trace_and_perfetto_show_torchs_collectives_with_bytes_and_messages(name: str) -> None:
    trace, marks = Trace(), [0.0] * RANKS
    sent = on_ranks(partial(last_step, name=name, marks=marks), trace=trace)
    events = [event for event in trace.events if event.start >= marks[event.rank]]
    assert STEPS > 1 and len(events) < len(trace.events)
    for rank in range(RANKS):
        own = [event for event in events if event.rank == rank]
        found = Counter(
            (event.name.split()[0], event.bytes) for event in own if event.kind == "collective"
        )
        assert found == EXPECTED[name]
        assert sum(event.bytes for event in own if event.kind == "send") == sent[rank]
        # the program's own line, whatever of torch and of ours is between
        lines = {event.line.split(":")[0] for event in own if event.kind in COMMUNICATION}
        assert lines == {"c10d_training.py"}
    pairs = messages(events)
    assert len(pairs) == sum(event.kind == "send" for event in events)
    assert all(one.bytes == other.bytes for one, other in pairs)
    shown(events, name)


def shown(events: list[Event], name: str) -> None:
    """Assert that the file for Perfetto has the collectives, and an arrow for each message."""
    written: list[dict[str, Any]] = list(entries(events))
    slices = Counter(
        (each["name"].split()[0], each["args"]["bytes"])
        for each in written
        if each["ph"] == "X" and each.get("cat") == "collective"
    )
    assert slices == Counter({key: RANKS * count for key, count in EXPECTED[name].items()})
    arrows = Counter(each["ph"] for each in written if each["ph"] in "sf")
    assert arrows == {"s": len(messages(events)), "f": len(messages(events))}


def test_the_player_shows_whose_contributions_torchs_collectives_bring() -> None:
    def program(comm: Watching) -> None:
        dist.init_process_group("minidist")
        mine = torch.full((8,), float(comm.contribution), dtype=torch.float64)
        dist.all_reduce(comm.watch("gradient", mine, cells=comm.size))
        shard = torch.full((2,), float(comm.contribution), dtype=torch.float64)
        whole = comm.watch("gathered", torch.zeros(8, dtype=torch.float64), cells=comm.size)
        dist.all_gather_single(whole, shard)

    recording = record(program, RANKS, torch=True)
    everyone = (1,) * RANKS
    for rank in range(RANKS):
        steps = [step for step in recording.steps if step.rank == rank]
        ends = [step.text for step in steps if step.kind == "ends"]
        assert ends == [
            f"rank {rank} ends {what} recursive" for what in ("all_reduce", "all_gather")
        ]
        assert {"sends", "receives", "adds"} <= {str(step.kind) for step in steps}
        last = steps[-1].buffers
        assert last["gradient"] == (everyone,) * RANKS
        assert last["gathered"] == tuple(
            tuple(int(other == cell) for other in range(RANKS)) for cell in range(RANKS)
        )
    page = player(recording)
    assert "begins all_reduce recursive" in page and "recursive.py" in page
