"""A handle does what the plain call does: the same bits, messages, events and virtual time, for less
Python. It refuses memory that it was not prepared for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import collective_cases
import numpy as np
import pytest
import torch
from collective_cases import FEW, OPERATIONS, available, cells, check, copied, draw, raw
from ranks import mpirun

from minidist import Cluster, Communicator, run
from minidist.full.collectives import (
    COLLECTIVES,
    all_reduce,
    fast,
    operations,
    prepare,
    shared,
    tree,
)
from minidist.full.comm import DeadlockError, Link, MismatchError
from minidist.full.trace import Trace
from minidist.full.trace.events import Event

LINK = Link(1e-6, 1e9)
ONE_NODE, TWO_NODES = (
    Cluster(LINK, Link(1e-5, 1e8), ranks_per_node=size, name=f"nodes of {size}") for size in (4, 2)
)


def thrice(operation: str) -> Callable[..., Any]:
    """Return the operation as a handle that is called three times on the same values."""
    signature = inspect.signature(OPERATIONS[operation])

    def by_handle(*given: Any, **named: Any) -> Any:
        (_, buffer), (_, comm), *options = signature.bind(*given, **named).arguments.items()
        before = None if buffer is None else copied(buffer)
        handle = prepare(operation, buffer, comm, **dict(options))
        assert buffer is None or raw(buffer) == raw(before), "prepare computed something"
        first = second = None
        for _ in range(3):
            if buffer is not None:
                buffer[:] = before
            result = handle()
            first, second = second, raw(buffer if result is None else result)
        assert first == second and result is handle.result
        return result

    return by_handle


@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
@pytest.mark.parametrize("operation", COLLECTIVES)
def test_every_handle_gives_numpys_answer_each_time(
    operation: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every algorithm and reduction, or it is refused as the plain call is."""
    monkeypatch.setattr(collective_cases, operation, thrice(operation))
    run(lambda comm: check(comm, cells([operation], FEW, ("mean", "max"))), ranks)


def recorded(cluster: Cluster, operation: str, handles: bool) -> tuple[list[Any], list[Event]]:
    """Call every algorithm of an operation twice, by handle or not; return what can be seen."""

    def program(comm: Communicator) -> list[Any]:
        seen: list[Any] = []
        for algorithm in available(operation, comm):
            for count in (8, 40_000, 600_000):
                buffer = draw(count, "float32", comm.rank)
                options: dict[str, Any] = {"algorithm": algorithm}
                if operation in ("all_gather", "gather"):
                    options["counts"] = [count] * comm.size
                call = lambda b=buffer, o=options: OPERATIONS[operation](b, comm, **o)  # noqa: E731
                if handles:
                    call = prepare(operation, buffer, comm, **options)
                for _ in range(3):
                    buffer[:] = draw(count, "float32", comm.rank)
                    result = call()
                    traffic = comm.traffic.messages, comm.traffic.bytes
                    digest = raw(buffer if result is None else result)
                    seen.append((algorithm, count, digest, traffic, comm.clock()))
        return seen

    trace = Trace()
    return run(program, 4, cluster=cluster, trace=trace), [
        replace(event, line="") for event in sorted(trace.events, key=repr)
    ]


@pytest.mark.parametrize("cluster", (ONE_NODE, TWO_NODES), ids=lambda cluster: cluster.name)
@pytest.mark.parametrize("operation", COLLECTIVES)
def test_nobody_sees_from_outside_that_it_was_prepared(operation: str, cluster: Cluster) -> None:
    """The bits, the messages and bytes, the moments and every event of the trace."""
    (plain, events), (prepared, theirs) = (
        recorded(cluster, operation, handles) for handles in (False, True)
    )
    assert plain == prepared and len(plain[0]) >= 9
    assert events == theirs and {event.kind for event in events} >= {"collective"}


def test_handles_and_plain_calls_take_turns_in_shared_memory() -> None:
    """Neither writes into what a slow rank still reads of the other."""

    def program(comm: Communicator) -> None:
        mine, other = np.zeros(100), np.zeros(70_000)
        handles = [prepare("all_reduce", each, comm, algorithm="shared") for each in (mine, other)]
        for step in range(40):
            for each, handle in zip((mine, other), handles, strict=True):
                each[:] = comm.rank + step
                if step % 3 == 2:
                    all_reduce(each, comm, algorithm="shared")
                elif step % 5 or each is mine:
                    handle()
                    assert (each == 1 + 2 * step).all()

    run(program, 2)


def test_the_second_call_chooses_checks_and_allocates_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("this belongs into prepare")

    def program(comm: Communicator) -> list[str]:
        handles = []
        for operation in COLLECTIVES:
            for algorithm in available(operation, comm):
                options = {"counts": [9] * comm.size} if "gather" in operation else {}
                buffer = np.ones(9 if "gather" in operation else 20)
                handles.append(prepare(operation, buffer, comm, algorithm=algorithm, **options))
        comm.all_gather_object(None)
        for module, name in (
            (operations, "find"),
            (operations, "flatten"),
            (operations, "reduction"),
            (operations, "new_rows"),
            (shared, "_half"),
            (fast, "empty"),
            (tree, "empty"),
        ):
            if comm.rank == 0:
                monkeypatch.setattr(module, name, refuse)
        comm.all_gather_object(None)
        for handle in handles:
            handle()
        return [handle.algorithm for handle in handles[:3]]

    assert run(program, 4)[0] == ["recursive", "central", "ring"]


def test_a_buffer_that_has_moved_is_refused() -> None:
    def program(comm: Communicator) -> None:
        tensor, freed = (torch.ones(6, dtype=torch.bfloat16) for _ in range(2))
        array = np.ones((2, 3))
        for buffer, change, words in (
            (tensor, lambda: tensor.set_(torch.ones(6, dtype=torch.bfloat16)), "in other memory"),
            (tensor, lambda: setattr(tensor, "data", torch.ones(6)), "torch.float32 of shape (6,)"),
            (array, lambda: array.resize((6, 1), refcheck=False), "float64 of shape (6, 1)"),
        ):
            handle = prepare("all_reduce", buffer, comm)
            handle()
            change()
            sent = comm.traffic.messages
            with pytest.raises(ValueError, match=re.escape(words) + ".*prepare it again"):
                handle()
            assert comm.traffic.messages == sent
        handles = [prepare("all_reduce", buffer, comm) for buffer in (array, freed)]
        with pytest.raises(ValueError, match="cannot resize"):  # numpy refuses by itself
            array.resize(7)
        handles[1]()
        freed.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="in other memory"):
            handles[1]()

    run(program, 2)


def test_ranks_that_prepare_or_call_different_things_are_told() -> None:
    def prepares(comm: Communicator) -> None:
        prepare("all_reduce", np.ones(4 + comm.rank), comm)

    def calls(comm: Communicator) -> None:
        first, second = (prepare("all_reduce", np.ones(4), comm) for _ in range(2))
        (second if comm.rank else first)()

    def mixes(comm: Communicator) -> None:
        (prepare if comm.rank else OPERATIONS["all_reduce"])(  # type: ignore[operator]
            *(["all_reduce"] if comm.rank else []), np.ones(4), comm
        )

    for program, words in (
        (prepares, r"all_reduce\(float64, 4, .*all_reduce\(float64, 5"),
        (
            calls,
            r"rank 0 calls handle 1, all_reduce\(\) at test_prepared.py.*; rank 1 calls handle 2, all_reduce",
        ),
        (mixes, r"rank 0 calls all_reduce.*rank 1 calls prepare\(all_reduce\)"),
    ):
        with pytest.raises(MismatchError, match=words):
            run(program, 2, debug=True)


def test_a_deadlock_names_what_was_prepared() -> None:
    def program(comm: Communicator) -> None:
        handle = prepare("broadcast", np.ones(4), comm)
        if comm.rank:
            handle()

    with pytest.raises(
        DeadlockError, match=r"rank 1 waits: receive.* in broadcast at test_prepared.py:\d+ in prog"
    ):
        run(program, 2)


def test_a_stream_runs_handles_under_the_operations_name() -> None:
    def program(comm: Communicator) -> None:
        stream, buffer = comm.stream(), np.ones(5)
        handle = stream.launch(prepare, "all_reduce", buffer, stream.comm).wait()
        stream.launch(handle).wait()
        assert (buffer == comm.size).all()

    trace = Trace()
    run(program, 2, trace=trace)
    assert [e.name for e in trace.events if e.kind == "wait"].count("wait for all_reduce") == 2


def test_an_operation_that_does_not_exist_is_not_prepared() -> None:
    with pytest.raises(ValueError, match="there is no collective 'allreduce' to prepare: choose"):
        run(lambda comm: prepare("allreduce", np.ones(3), comm), 2)


OVER_MPI = """
    import collective_cases, minidist
    from collective_cases import cells, check
    from test_prepared import thrice
    from minidist.full.collectives import COLLECTIVES

    comm = minidist.init(limit=60)
    for operation in COLLECTIVES:
        setattr(collective_cases, operation, thrice(operation))
        check(comm, cells([operation], ("float32", "int64"), ("mean", "max")), (0, 11, 9000))
"""


def test_handles_over_mpi() -> None:
    """There exchanges are persistent requests, and MPI's own collectives are prepared, too."""
    job = mpirun(2, OVER_MPI)
    assert job.returncode == 0, job.stderr
