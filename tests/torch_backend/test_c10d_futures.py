"""Futures of operations: whoever waits for one, in Python or in C++, and callbacks that nobody waits
for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future, collect_all, wait_all

import minidist
from minidist.full.comm import Cluster, Communicator, DeadlockError


def future_of(value: float) -> Any:
    work = dist.all_reduce(torch.full((2,), value), async_op=True)
    return work.get_future()


def collected() -> list[float]:
    doubled = future_of(1).then(lambda done: 2 * done.value()[0])
    done = collect_all([future_of(2), doubled]).wait()
    return [done[0].value()[0][0].item(), done[1].value()[0].item()]


def waited_for_all() -> list[float]:
    theirs: Future[list[torch.Tensor]] = Future()
    theirs.set_result([torch.full((2,), 6.0)])
    return [one[0][0].item() for one in wait_all([future_of(1), theirs])]


def collected_then() -> list[float]:
    """A callback of the collected future that communicates."""
    both = collect_all([future_of(1), future_of(2)])

    def add_up(done: Any) -> torch.Tensor:
        whole = torch.stack([one.value()[0] for one in done.value()]).sum(0)
        dist.all_reduce(whole)
        return whole

    return both.then(add_up).wait().tolist()  # type: ignore[no-any-return]


def polled() -> list[float]:
    future = future_of(3)
    while not future.done():
        pass
    return future.value()[0].tolist()  # type: ignore[no-any-return]


def waited_for_in_cpp() -> list[float]:
    """A future that C++ has made of ours, as it does for some of DDP's hooks."""
    torch_then: Any = torch._C.Future.then
    return torch_then(future_of(3), lambda done: done.value()[0]).wait().tolist()  # type: ignore[no-any-return]


def waited_for_as_a_script() -> list[float]:
    return torch.jit.wait(future_of(2))[0].tolist()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.torch.jit.wait. is deprecated")
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (collected, [6, 6]),
        (waited_for_all, [3, 6]),
        (collected_then, [27, 27]),
        (polled, [9, 9]),
        (waited_for_in_cpp, [9, 9]),
        (waited_for_as_a_script, [6, 6]),
    ],
)
def test_every_way_to_wait_for_a_future_completes_it(
    program: Callable[[], list[float]], expected: list[float]
) -> None:
    def on_a_rank(_: Communicator) -> list[float]:
        dist.init_process_group("minidist")
        return program()

    assert minidist.run(on_a_rank, 3, torch=True) == [expected] * 3


def test_a_callback_that_nobody_waits_for_runs_with_a_later_wait_or_at_the_end() -> None:
    def program(_: Communicator) -> list[list[str]]:
        dist.init_process_group("minidist")
        ran: list[str] = []
        first, second, third = future_of(1), future_of(2), future_of(3)
        third.add_done_callback(lambda _: ran.append("third"))
        first.then(lambda _: ran.append("first"))
        seen = [list(ran)]
        first.then(lambda _: ran.append(f"sum {second.wait()[0][0].item():g}"))
        second.wait()
        seen.append(list(ran))
        dist.destroy_process_group()
        return [*seen, ran]

    early = ["first", "sum 4"]
    assert minidist.run(program, 2, torch=True) == [[[], early, [*early, "third"]]] * 2


def test_an_error_in_a_callback_is_the_future_s() -> None:
    def program(_: Communicator) -> str:
        dist.init_process_group("minidist")
        wrong = future_of(1).then(lambda _: {}["missing"])
        with pytest.raises(Exception, match="missing"):
            collect_all([wrong]).wait()
        with pytest.raises(Exception, match="missing"):
            wrong.wait()
        return "heard"

    assert minidist.run(program, 2, torch=True) == ["heard"] * 2


def test_the_clock_moves_to_the_end_of_what_was_collected() -> None:
    def program(comm: Communicator) -> bool:
        dist.init_process_group("minidist")
        before = comm.clock()
        collect_all([future_of(1)]).wait()
        return comm.clock() > before

    assert minidist.run(program, 2, torch=True, cluster=Cluster.h100(nodes=1)) == [True, True]


def test_a_future_that_cannot_be_completed_names_who_waits() -> None:
    def program(comm: Communicator) -> None:
        dist.init_process_group("minidist")
        if comm.rank == 0:
            collect_all([future_of(1)]).wait()

    with pytest.raises(DeadlockError):
        minidist.run(program, 2, torch=True)
