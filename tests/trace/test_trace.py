"""What a trace says: every message with both ends, tables that add up by hand, and a file that a
viewer can load.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import mpirun

from minidist import Cluster, Communicator, Trace, run
from minidist.draw.gather_trace import clocks_ahead, gather_trace, moved
from minidist.draw.perfetto import entries, write
from minidist.draw.table import covered, format_bytes, format_seconds, time_table
from minidist.full.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from minidist.full.trace.events import Event, messages
from minidist.full.trace.lines import source_line

LINK = Cluster.uniform(latency=1e-5, bandwidth=1e9)
patient = settings(deadline=None, max_examples=150)


def ring(comm: Communicator) -> None:
    """Compute 2 ms; all-reduce 24 kB: 2 (P - 1) = 4 steps of 8 kB, each 10 us + 8 us, are 72 us."""
    with comm.span("forward"):
        comm.advance(2e-3)
    all_reduce(np.ones(3000), comm, algorithm="ring")


def traced(program: Any, ranks: int = 3, cluster: Cluster | None = LINK, **options: Any) -> Trace:
    trace = Trace()
    run(program, ranks, cluster=cluster, trace=trace, **options)
    return trace


def rows(table: str) -> list[dict[str, str]]:
    """Read the tables back: one dictionary a line, by the heads of the columns, which two spaces
    part at least.
    """
    found = []
    for block in table.split("\n\n"):
        head, *lines = (
            [cell for cell in line.replace("  ", "\t").split("\t") if cell]
            for line in block.split("\n")
        )
        found += [
            dict(zip((h.strip() for h in head), (c.strip() for c in line), strict=True))
            for line in lines
        ]
    return found


# ---------------------------------------------------------------- events


@pytest.mark.parametrize("cluster", [LINK, None])
def test_every_message_has_both_ends_and_they_agree(cluster: Cluster | None) -> None:
    events = traced(ring, cluster=cluster).events
    pairs = messages(events)
    kinds = Counter(event.kind for event in events)
    # 2 (P - 1) messages a rank
    assert kinds == {"compute": 3, "collective": 3, "send": 12, "recv": 12}
    assert len(pairs) == 12 and len({send.flow for send, _ in pairs}) == 12
    for send, receive in pairs:
        assert (send.kind, receive.kind) == ("send", "recv") and send.flow == receive.flow
        assert send.name == f"send to {receive.rank}" and receive.name == f"recv from {send.rank}"
        assert send.bytes == receive.bytes == 8000
        assert send.start <= receive.end
        assert send.line == receive.line and send.line.endswith("in ring")


def test_messages_of_two_runs_in_one_trace_and_messages_with_one_end() -> None:
    trace = Trace()
    for _ in range(2):
        run(ring, 3, trace=trace)
    pairs = messages(trace.events)
    assert len(pairs) == 24 and all(send.start <= receive.end for send, receive in pairs)
    assert (
        messages(
            [Event(0, "send", "send to 1", 0, 1, flow="a"), Event(1, "recv", "recv from 0", 0, 1)]
        )
        == []
    )


def test_ends_pair_in_the_order_of_posting_whatever_is_waited_for_first() -> None:
    def program(comm: Communicator) -> None:
        buffers = [np.zeros(size) for size in (1, 2, 3)]
        if comm.rank == 0:
            requests = [comm.isend(buffer, 1) for buffer in buffers]
            # as a collective does, while the user's messages are under way
            comm.internal.send(np.zeros(4), 1)
        else:
            comm.internal.recv(np.zeros(4), 0)  # which the other end has posted after them
            requests = [comm.irecv(buffer, 0) for buffer in buffers]
        for request in requests if comm.rank else reversed(requests):
            request.wait()

    pairs = messages(traced(program, ranks=2).events)
    assert sorted(send.bytes for send, _ in pairs) == [8, 16, 24, 32]
    assert all(send.bytes == receive.bytes for send, receive in pairs)


def test_a_message_knows_since_when_it_was_waited_for() -> None:
    def program(comm: Communicator) -> None:
        request = comm.irecv(np.zeros(1000), 1) if comm.rank == 0 else comm.isend(np.zeros(1000), 0)
        with comm.span("compute"):
            comm.advance(2e-6)  # of the 18 us that 8 kB take
        request.wait()

    table = rows(time_table(traced(program, ranks=2).events))
    assert [(row["compute"], row["exposed"]) for row in table] == [
        ("2.0 us", "16.0 us"),
        ("2.0 us", "6.0 us"),
    ]
    # a sender is done when its port is free
    assert [row["overlapped"] for row in table] == ["2.0 us", "2.0 us"]


def test_one_rank_alone_calls_no_collective() -> None:
    """Nothing is sent, so the trace is the same for all eight of them: empty."""

    def every(comm: Communicator) -> None:
        for each in (all_reduce, reduce_scatter, all_gather, broadcast, reduce, gather, all_to_all):
            each(np.ones(2), comm)
        scatter(np.ones(2) if comm.rank == 0 else None, comm)

    assert traced(every, ranks=1).events == []
    assert Counter(event.kind for event in traced(every, ranks=2).events)["collective"] == 2 * 8


def test_what_a_stream_does_bears_the_line_that_launched_it() -> None:
    def launching(comm: Communicator) -> None:
        stream = comm.stream()
        job = stream.launch(all_reduce, np.ones(8), stream.comm)
        all_reduce(np.ones(8), comm)
        job.wait()

    events = traced(launching, ranks=2).events
    lines = {(event.track, event.kind): event.line for event in events}
    first = launching.__code__.co_firstlineno
    for (track, kind), line in lines.items():
        number = first + (4 if kind == "wait" else 3 if track == "main" else 2)
        assert line == f"test_trace.py:{number} in launching", (track, kind)
    assert len(lines) == 7  # two tracks of a collective and its messages, and the wait


def test_the_source_line_is_the_callers() -> None:
    assert source_line().endswith("in test_the_source_line_is_the_callers")


# ---------------------------------------------------------------- the table


def test_table_of_a_ring_by_hand() -> None:
    first, *_, collective = rows(time_table(traced(ring).events))
    assert first == {
        "rank": "0", "total": "2.1 ms", "compute": "2.0 ms", "exposed": "72.0 us", "other": "0", "overlapped": "0",
        "communicating": "3.5%", "messages": "4", "sent": "31.2 KiB",
    }  # fmt: skip
    assert collective == {
        "collective": "all_reduce ring", "calls": "3", "bytes": "70.3 KiB", "time": "216.0 us", "a call": "72.0 us",
    }  # fmt: skip


def test_table_of_a_stream_by_hand() -> None:
    def backward(comm: Communicator) -> None:
        stream = comm.stream()
        # 4 x (10 us + 800 us)
        handle = stream.launch(all_reduce, np.ones(300_000), stream.comm, "sum", "ring")
        with comm.span("backward"):
            comm.advance(1e-3 * (1 + comm.rank))
        handle.wait()
        comm.advance(1e-3)  # nobody records what this is
        comm.trace.held(comm.rank, comm.clock(), 1)  # type: ignore[union-attr]
        comm.barrier()

    def without_barrier(trace: Trace) -> list[Event]:
        return [
            event
            for event in trace.events
            if event.track != "main" or event.kind not in ("send", "recv")
        ]

    table = rows(time_table(without_barrier(traced(backward))))
    picked = [
        (row["total"], row["compute"], row["exposed"], row["overlapped"]) for row in table[:3]
    ]
    assert picked == [
        ("3.2 ms", "1.0 ms", "2.2 ms", "1.0 ms"),
        ("3.2 ms", "2.0 ms", "1.2 ms", "2.0 ms"),
        ("3.2 ms", "3.0 ms", "240.0 us", "3.0 ms"),
    ]
    assert [row["communicating"] for row in table[:3]] == ["69.1%", "38.3%", "7.4%"]
    assert [row["messages"] for row in table[:3]] == ["4", "4", "4"]


def test_nested_events_count_once_and_the_rest_is_other() -> None:
    events = [
        Event(0, "compute", "forward", 10.0, 14.0),
        Event(0, "collective", "all_gather ring", 11.0, 13.0, bytes=100),  # inside the forward
        Event(0, "send", "send to 1", 11.0, 12.0, bytes=50),
        Event(0, "recv", "recv from 1", 11.0, 12.5),
        Event(0, "wait", "wait for reduce", 16.0, 17.0),
        Event(0, "held", "bytes held", 30.0, 30.0, bytes=7),
    ]
    (row, _) = rows(time_table(events))
    assert (row["total"], row["compute"], row["exposed"], row["other"]) == (
        "7.0 s",
        "2.0 s",
        "3.0 s",
        "2.0 s",
    )
    assert (row["overlapped"], row["messages"], row["sent"], row["communicating"]) == (
        "0",
        "1",
        "50 B",
        "42.9%",
    )


def test_a_message_posted_ahead_is_overlapped_until_it_is_waited_for() -> None:
    computing = Event(0, "compute", "backward", 0.0, 10.0)
    message = Event(0, "send", "send to 1", 1.0, 12.0, waited_from=10.0)
    (row,) = rows(time_table([computing, message]))
    assert (row["compute"], row["exposed"], row["overlapped"], row["total"]) == (
        "10.0 s",
        "2.0 s",
        "9.0 s",
        "12.0 s",
    )
    (row,) = rows(time_table([computing, replace(message, waited_from=None)]))
    assert (row["compute"], row["exposed"], row["overlapped"]) == ("1.0 s", "11.0 s", "0")


@patient
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6))))
def test_covered_counts_each_moment_once(starts_and_lengths: list[tuple[int, int]]) -> None:
    intervals = [(start, start + length) for start, length in starts_and_lengths]
    assert covered(intervals) == len(
        {moment for start, end in intervals for moment in range(start, end)}
    )


def test_units() -> None:
    seconds = {
        0: "0",
        2.3e-9: "2.3 ns",
        1e-6: "1.0 us",
        999.96e-6: "1.0 ms",
        0.0125: "12.5 ms",
        75: "75.0 s",
    }
    assert {value: format_seconds(value) for value in seconds} == seconds
    sizes = {
        0: "0 B",
        1023: "1023 B",
        1024: "1.0 KiB",
        3 << 19: "1.5 MiB",
        5 << 30: "5.0 GiB",
        1 << 41: "2.0 TiB",
    }
    assert {value: format_bytes(value) for value in sizes} == sizes
    assert time_table([]) == "nothing was recorded"


# ---------------------------------------------------------------- the file, read as Perfetto reads it


@dataclass(eq=False)
class Slice:
    name: str
    pid: int
    row: str
    start: int
    end: int
    depth: int


@dataclass
class View:
    """What is on the screen: nothing that was in the file may be missing here."""

    slices: list[Slice]
    arrows: list[tuple[Slice, Slice]]
    processes: dict[int, str]
    counters: list[tuple[int, int, dict[str, float]]]


def view(file: list[dict[str, Any]]) -> View:
    """Load as Perfetto does (slice_tracker.cc, flow_tracker.cc): by time, with a stack of open
    slices per thread.
    """
    assert all(entry["ph"] in "MXCsf" and isinstance(entry["pid"], int) for entry in file)
    names = {e["tid"]: (e["pid"], e["args"]["name"]) for e in file if e["name"] == "thread_name"}
    assert len(names) == sum(e["name"] == "thread_name" for e in file), (
        "threads of two processes share a number"
    )
    assert not names.keys() & {entry["pid"] for entry in file}
    seen = View(
        [], [], {e["pid"]: e["args"]["name"] for e in file if e["name"] == "process_name"}, []
    )
    stacks: dict[int, list[Slice]] = defaultdict(list)
    begun: dict[int, Slice] = {}
    for entry in sorted((e for e in file if e["ph"] != "M"), key=lambda e: round(e["ts"] * 1000)):
        assert isinstance(entry["ts"], (int, float)) and entry["ts"] >= 0
        start = round(entry["ts"] * 1000)
        if entry["ph"] == "C":
            seen.counters.append((entry["pid"], start, entry["args"]))
            continue
        pid, row = names[entry["tid"]]
        assert pid == entry["pid"]
        stack = stacks[entry["tid"]]
        if entry["ph"] == "X":
            assert isinstance(entry["dur"], (int, float)) and entry["dur"] >= 0
            end = start + round(entry["dur"] * 1000)
            while (
                stack
                and stack[-1].end <= start
                and not stack[-1].start == stack[-1].end == start == end
            ):
                stack.pop()
            assert all(end <= outer.end for outer in stack), (
                f"{entry} crosses {stack}: it would be dropped"
            )
            stack.append(Slice(entry["name"], pid, row, start, end, len(stack)))
            seen.slices.append(stack[-1])
        elif entry["ph"] == "s":
            assert entry["id"] not in begun and (stack[-1].start == start)
            begun[entry["id"]] = stack[-1]
        else:
            assert entry["bp"] == "e" and entry["id"] in begun, (
                "an arrow that ends before it starts is dropped"
            )
            assert begun[entry["id"]].start <= stack[-1].start <= start, (
                "the arrow would be turned round"
            )
            seen.arrows.append((begun.pop(entry["id"]), stack[-1]))
    assert not begun
    return seen


def check(trace: Trace) -> View:
    """Assert that a viewer shows every event of the trace, and every message as an arrow between
    its two ends.
    """
    seen = view(json.loads(json.dumps(entries(trace.events))))
    events = [event for event in trace.events if event.kind != "held"]
    begin = min((event.start for event in trace.events), default=0.0)
    wanted = Counter(
        (e.name, e.rank, round((e.start - begin) * 1e9), round((e.end - begin) * 1e9))
        for e in events
    )
    assert (
        Counter((s.name, s.pid, s.start, s.end) for s in seen.slices if s.name != "arriving")
        == wanted
    )
    pairs = [(send, receive) for send, receive in messages(events) if send.start <= receive.end]
    ends = Counter(
        (send.rank, receive.rank, round((send.start - begin) * 1e9)) for send, receive in pairs
    )
    assert Counter((out.pid, into.pid, out.start) for out, into in seen.arrows) == ends
    for out, into in seen.arrows:
        assert out.name.startswith("send") and "sends" in out.row
        assert into.name == "arriving" or into.name.startswith("recv")
    assert all(
        s.depth == 0 for s in seen.slices if s.name.startswith(("send", "recv")) and s.start < s.end
    )
    return seen


def busy(comm: Communicator) -> None:
    """Compute, collectives, two streams, and messages that overlap and are awaited in another order
    than posted.
    """
    rng = random.Random(comm.rank)
    streams = [comm.stream(), comm.split(0).stream()]
    for step in range(3):
        handles = [
            s.launch(all_reduce, np.ones(1000 * (1 + step)), s.comm, "sum", "ring") for s in streams
        ]
        with comm.span("step"):
            comm.advance(rng.random() * 1e-4)
            with comm.span("inner"):
                all_reduce(np.ones(10), comm, algorithm="recursive")
        buffers = [np.zeros(10**power) for power in range(4)]
        others = [peer for peer in range(comm.size) if peer != comm.rank]
        pending = [
            comm.irecv(b.copy(), peer, tag) for peer in others for tag, b in enumerate(buffers)
        ]
        comm.advance(rng.random() * 1e-4)
        pending += [comm.isend(b, peer, tag) for peer in others for tag, b in enumerate(buffers)]
        for request in pending if comm.rank % 2 else reversed(pending):
            request.wait()
        for handle in handles:
            handle.wait()
        comm.trace.held(comm.rank, comm.clock(), 1 << (20 + step))  # type: ignore[union-attr]
        comm.barrier()


@pytest.mark.parametrize("cluster", [LINK, None])
def test_the_file_of_a_busy_program_loses_nothing(cluster: Cluster | None) -> None:
    trace = traced(busy, cluster=cluster)
    assert len(messages(trace.events)) == sum(event.kind == "send" for event in trace.events) > 100
    seen = check(trace)
    assert seen.processes == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    assert [args["bytes held"] for pid, _, args in seen.counters if pid == 1] == [
        1 << 20,
        1 << 21,
        1 << 22,
    ]
    found = {slice.row for slice in seen.slices if slice.pid == 2}
    assert {
        "compute",
        "communication",
        "sends",
        "sends 2",
        "receives",
        "stream +1: sends",
        "stream /2.0+1: sends",
    } <= found
    assert any(slice.name == "arriving" for slice in seen.slices)
    assert {slice.depth for slice in seen.slices if slice.row == "compute"} == {0, 1}


def test_the_file_of_a_ring(tmp_path: Path) -> None:
    trace = traced(ring)
    write(trace.events, tmp_path / "ring.json")
    file = json.loads((tmp_path / "ring.json").read_text())["traceEvents"]
    seen = view(file)
    assert len(seen.slices) == 30 and len(seen.arrows) == 12
    assert {slice.row for slice in seen.slices} == {"compute", "communication", "sends", "receives"}
    assert (
        min(slice.start for slice in seen.slices) == 0
        and max(slice.end for slice in seen.slices) == 2_072_000
    )
    assert all(into.pid == (out.pid + 1) % 3 for out, into in seen.arrows)
    first = next(entry for entry in file if entry["name"] == "send to 1")
    assert first["args"]["bytes"] == 8000 and first["args"]["line"].endswith("in ring")
    assert (tmp_path / "ring.json").read_text().count("\n") == len(file) + 2  # an entry a line


def test_a_receive_posted_early_shows_when_its_message_was_sent() -> None:
    trace = Trace(
        [
            Event(1, "recv", "recv from 0", 5.0, 9.0, flow="a"),
            Event(0, "send", "send to 1", 8.0, 9.0, flow="a"),
        ]
    )
    ((out, into),) = check(trace).arrows
    assert (out.start, out.end) == (into.start, into.end) == (
        3_000_000_000,
        4_000_000_000,
    ) and into.name == "arriving"


def test_clocks_that_disagree_draw_no_arrow_back_in_time() -> None:
    trace = Trace(
        [
            Event(1, "recv", "recv from 0", 5.0, 6.0, flow="a"),
            Event(0, "send", "send to 1", 8.0, 9.0, flow="a"),
        ]
    )
    seen = check(trace)
    assert seen.arrows == [] and len(seen.slices) == 2


@st.composite
def any_trace(draw: st.DrawFn) -> Trace:
    """Spans that nest at random, and messages at any time, on a coarse clock where much
    coincides.
    """
    events = []
    for rank, kind in itertools.product(range(2), ("compute", "collective")):
        opened: list[int] = []
        for moment in sorted(draw(st.lists(st.integers(0, 12), max_size=8))):
            if opened and draw(st.sampled_from([True, False])):
                events.append(Event(rank, kind, kind, opened.pop() * 1e-9, moment * 1e-9))
            else:
                opened.append(moment)
    for number, (start, wait, late, long) in enumerate(
        draw(st.lists(st.tuples(*[st.integers(0, 5)] * 4), max_size=8))
    ):
        ends = (
            start * 1e-9,
            (start + wait) * 1e-9,
            (start + late - 2) * 1e-9,
            (start + late - 2 + long) * 1e-9,
        )
        events.append(Event(0, "send", "send to 1", ends[0], ends[1], flow=str(number)))
        events.append(Event(1, "recv", "recv from 0", ends[2], ends[3], flow=str(number)))
    events += [
        Event(0, "held", "bytes held", moment * 1e-9, moment * 1e-9, moment)
        for moment in draw(st.sets(st.integers(0, 9)))
    ]
    return Trace(draw(st.permutations(events)))


@patient
@given(any_trace())
def test_any_trace_loses_nothing(trace: Trace) -> None:
    check(trace)


def test_spans_of_equal_extent_nest_as_they_were_opened() -> None:
    inner, outer = Event(0, "collective", "inner", 0.0, 1.0), Event(0, "wait", "outer", 0.0, 1.0)
    seen = check(Trace([inner, outer]))  # the inner one ends, and is recorded, first
    assert [(slice.name, slice.depth) for slice in seen.slices] == [("outer", 0), ("inner", 1)]


def test_there_are_as_few_rows_as_can_be() -> None:
    sends = [
        Event(0, "send", "send to 1", start, end)
        for start, end in ((0.0, 1.0), (0.0, 0.0), (1.0, 3.0), (2.0, 4.0))
    ]
    assert {slice.row for slice in check(Trace(sends[:3])).slices} == {"sends"}
    assert {slice.row for slice in check(Trace(sends)).slices} == {"sends", "sends 2"}


def test_spans_that_cross_lie_in_two_rows() -> None:
    waits = [
        Event(0, "wait", "wait for one", 0.0, 2.0),
        Event(0, "wait", "wait for another", 1.0, 3.0),
    ]
    assert {slice.row for slice in check(Trace(waits)).slices} == {
        "communication",
        "communication 2",
    }


def test_an_empty_trace_is_a_valid_file(tmp_path: Path) -> None:
    write([], tmp_path / "empty.json")
    assert json.loads((tmp_path / "empty.json").read_text()) == {"traceEvents": []}


# ---------------------------------------------------------------- traces of several processes


def test_gathering_a_shared_trace_doubles_nothing() -> None:
    def program(comm: Communicator) -> int:
        ring(comm)
        comm.barrier()
        half = comm.split(comm.rank % 2)
        before = comm.clock()
        gathered = gather_trace(comm)
        assert comm.clock() == before
        assert {event.rank for event in gather_trace(half).events} == set(half.members)
        return sum(event.kind == "collective" for event in gathered.events)

    assert run(program, 3, cluster=Cluster.ethernet(nodes=3), trace=Trace()) == [3, 3, 3]


def test_gathering_from_processes(tmp_path: Path) -> None:
    program = f"""
        import numpy as np
        from minidist import Trace, init
        from minidist.full.collectives import all_reduce
        from minidist.draw.gather_trace import gather_trace
        from minidist.draw.perfetto import write
        from minidist.draw.table import time_table

        comm = init(trace=Trace())
        assert len(comm.trace.events) == 0
        for _ in range(3):
            all_reduce(np.ones(3000), comm, algorithm="ring")
        trace = gather_trace(comm)
        if comm.rank == 0:
            write(trace.events, {str(tmp_path / "mpi.json")!r})
            print(time_table(trace.events))
    """
    outcome = mpirun(3, program)
    assert outcome.returncode == 0, outcome.stderr
    assert [row["messages"] for row in rows(outcome.stdout.strip())[:3]] == ["12", "12", "12"]
    seen = view(json.loads((tmp_path / "mpi.json").read_text())["traceEvents"])
    assert len(seen.arrows) == 36  # none was left out: the clocks of one machine agree


def test_gathering_nothing_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"no rank has recorded a trace: start with init\(trace=Trace\(\)\)"
    ):
        run(gather_trace, 2)


def test_clocks_are_aligned_node_by_node() -> None:
    ahead = clocks_ahead(nodes=[0, 0, 2, 2], clocks=[100.0, 100.001, 7.0, 7.002])
    assert ahead == [0.0, 0.0, -93.0, -93.0]  # ranks of a node move together
    assert clocks_ahead(nodes=[1, 1], clocks=[5.0, 4.0]) == [0.0, 0.0]
    event = moved(Event(2, "send", "send to 0", 8.0, 9.0, waited_from=8.5), -ahead[2])
    assert (event.start, event.waited_from, event.end) == (101.0, 101.5, 102.0)
