"""Every call of torch.distributed on our ranks; calls that differ, and calls that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from c10d_calls import every_call
from ranks import mpirun

import minidist
from minidist.comm import Communicator, DeadlockError, MismatchError

HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_call_on_simulated_ranks(ranks: int) -> None:
    assert minidist.run(every_call, ranks, torch=True) == ["every call"] * ranks


def test_every_call_under_mpirun_without_any_variable() -> None:
    outcome = mpirun(3, HERE / "c10d_calls.py")
    assert outcome.stdout.count("every call") == 3, outcome.stderr


def test_every_call_on_a_communicator_that_exists() -> None:
    program = """
        import minidist
        from minidist import c10d
        from c10d_calls import every_call

        world = minidist.init()
        pair = world.split(world.rank % 2)
        with c10d.on(pair):
            print(every_call())
        assert pair.traffic.bytes_sent > 0
    """
    outcome = mpirun(4, program)
    assert outcome.stdout.count("every call") == 4, outcome.stderr


def different_sizes(comm: Communicator) -> None:
    dist.init_process_group("minidist")
    dist.all_reduce(torch.ones(3 + comm.rank))


def different_calls(comm: Communicator) -> None:
    dist.init_process_group("minidist")
    if comm.rank:
        dist.all_reduce(torch.ones(4))
    else:
        dist.broadcast(torch.ones(4), src=0)


def barrier_alone(comm: Communicator) -> None:
    dist.init_process_group("minidist")
    dist.barrier() if comm.rank else dist.all_reduce(torch.ones(4))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (different_sizes, "rank 0 calls all_reduce(float32, 3, sum, auto); rank 1 calls all_"),
        (different_calls, "rank 0 calls broadcast(float32, 4, auto, root=0); rank 1 calls all_red"),
        (barrier_alone, "rank 0 calls all_reduce(float32, 4, sum, auto); rank 1 calls barrier()"),
    ],
)
def test_ranks_that_call_differently_hear_it(program: object, words: str) -> None:
    with pytest.raises(MismatchError, match="do not make the same call") as error:
        minidist.run(program, 2, torch=True)  # type: ignore[arg-type]
    assert words in str(error.value)


def bitwise(comm: Communicator) -> None:
    dist.init_process_group("minidist")
    dist.all_reduce(torch.ones(4, dtype=torch.int32), dist.ReduceOp.BOR)


def average_of_integers(comm: Communicator) -> None:
    dist.init_process_group("minidist")
    dist.all_reduce(torch.ones(4, dtype=torch.int32), dist.ReduceOp.AVG)


def one_tensor_too_few(comm: Communicator) -> None:
    dist.init_process_group("minidist")
    dist.all_gather([torch.empty(4)], torch.ones(4))


def as_another_rank(comm: Communicator) -> None:
    dist.init_process_group("minidist", rank=0, world_size=2)


def waits_for_itself(comm: Communicator) -> None:
    dist.init_process_group("minidist")
    work = dist.irecv(torch.empty(4), comm.rank)
    assert work is not None
    work.wait()


def with_options(comm: Communicator) -> None:
    dist.init_process_group("minidist", pg_options=object())


@pytest.mark.parametrize(
    ("program", "kind", "words"),
    [
        (bitwise, NotImplementedError, "minidist does not reduce with"),
        (average_of_integers, TypeError, "the average of int32 is not int32"),
        (one_tensor_too_few, ValueError, "all_gather: 1 output tensors for 2 ranks"),
        (waits_for_itself, DeadlockError, "its own message .tag 0., which it has not sent"),
        (with_options, ValueError, "minidist's groups have no options: leave pg_options out"),
        (as_another_rank, ValueError, "rank=0, but it is 1: leave rank out"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(
    program: object, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        minidist.run(program, 2, torch=True)  # type: ignore[arg-type]
