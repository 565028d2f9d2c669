"""Every call of torch.distributed on our ranks; calls that differ, and calls that cannot be."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from c10d_calls import every_call
from ranks import mpirun
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import minidist
from minidist import Cluster
from minidist.full.comm import Communicator, DeadlockError, MismatchError

LINK_BYTES = 1e9  # a second
LINK = Cluster.uniform(latency=0, bandwidth=LINK_BYTES)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_call_on_simulated_ranks(ranks: int) -> None:
    assert minidist.run(every_call, ranks, torch=True) == ["every call"] * ranks


def test_every_call_under_mpirun_on_all_ranks_and_on_a_communicator_that_exists() -> None:
    program = """
        import minidist
        import torch.distributed as dist
        from minidist import torch_backend as c10d
        from c10d_calls import every_call

        world = minidist.init()
        turned = world.split(0, key=-world.rank)
        with c10d.on(turned):
            dist.init_process_group("minidist")
            assert dist.get_rank() == turned.rank == 1 - world.rank
            dist.destroy_process_group()
        print(every_call())  # of ranks that are found by no variable
    """
    outcome = mpirun(2, program)
    assert outcome.stdout.count("every call") == 2, outcome.stderr


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_without_memory_send_as_many_bytes_and_take_as_long(device: str) -> None:
    bytes, ranks = 1 << 20, 4

    def program(comm: Communicator) -> tuple[list[int], float]:
        dist.init_process_group("minidist")
        shard = torch.zeros(bytes // 4, device=device)
        whole, start = torch.zeros(bytes, device=device), comm.clock()
        sent = [comm.traffic.bytes]
        for call in (
            lambda: dist.all_reduce(shard),
            lambda: dist.all_gather_single(whole, shard),
            lambda: dist.reduce_scatter_single(shard, whole),
        ):
            call()
            sent.append(comm.traffic.bytes)
        return [after - before for before, after in pairwise(sent)], comm.clock() - start

    for sent, seconds in minidist.run(program, ranks, torch=True, cluster=LINK):
        rounds = 2 * (ranks - 1) / ranks, ranks - 1, ranks - 1  # of `bytes` each
        assert sent == [many * bytes for many in rounds]
        assert seconds == pytest.approx(sum(rounds) * bytes / LINK_BYTES)


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


def monitored_alone(comm: Communicator) -> None:
    dist.init_process_group("minidist")
    dist.barrier() if comm.rank else dist.monitored_barrier()


def different_eights(comm: Communicator) -> None:
    dist.init_process_group("minidist")
    kind = torch.float8_e4m3fn if comm.rank else torch.float8_e5m2  # eight bits travel as bytes
    dist.broadcast(torch.ones(4).to(kind), src=0)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            different_eights,
            "rank 0 calls broadcast(float8_e5m2) at 3; rank 1 calls broadcast(float8_e4m3fn) at 3",
        ),
        (different_sizes, "rank 0 calls all_reduce(float32, 3, sum, auto) at 2; rank 1 calls all_"),
        (
            different_calls,
            "rank 0 calls broadcast(float32, 4, auto, root=0) at 5; "
            "rank 1 calls all_reduce(float32, 4, sum, auto) at 3",
        ),
        (
            barrier_alone,
            "rank 0 calls all_reduce(float32, 4, sum, auto) at 2; rank 1 calls barrier() at 2",
        ),
        (monitored_alone, "rank 0 calls monitored_barrier() at 2; rank 1 calls barrier() at 2"),
    ],
)
def test_ranks_that_call_differently_hear_it_with_the_lines_of_all(
    program: Callable[[Communicator], None], words: str
) -> None:
    with pytest.raises(MismatchError, match="do not make the same call") as error:
        minidist.run(program, 2, torch=True)
    first, name = program.__code__.co_firstlineno, program.__name__
    place = rf"test_c10d_calls.py:(\d+) in {name}"
    assert words in re.sub(place, lambda at: str(int(at[1]) - first), str(error.value))


def bitwise(comm: Communicator) -> None:
    dist.init_process_group("minidist")
    dist.all_reduce(torch.ones(4), dist.ReduceOp.BOR)


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


def gathers_more_than_there_is_room_for(comm: Communicator) -> None:
    dist.init_process_group("minidist")
    targets = None if comm.rank else [torch.empty(2), torch.empty(3)]
    dist.gather(torch.ones(3 - comm.rank), targets, dst=0)


def receives_as_another_dtype(comm: Communicator) -> None:
    dist.init_process_group("minidist")
    if comm.rank:
        dist.recv(torch.empty(3, dtype=torch.int32), 0)
    else:
        dist.send(torch.ones(3), 1)


def with_options(comm: Communicator) -> None:
    dist.init_process_group("minidist", pg_options=object())


@pytest.mark.parametrize(
    ("program", "kind", "words"),
    [
        (bitwise, TypeError, "float32 numbers are not reduced bit by bit"),
        (average_of_integers, TypeError, "the average of int32 is not int32"),
        (one_tensor_too_few, ValueError, "all_gather: 1 output tensors for 2 ranks"),
        (waits_for_itself, DeadlockError, "its own message .tag 0., which it has not sent"),
        (
            gathers_more_than_there_is_room_for,
            MismatchError,
            r"the ranks bring \[3, 2\] elements for outputs of \[2, 3\]",
        ),
        (receives_as_another_dtype, MismatchError, "rank 0 sends float32 to rank 1, .*es int32"),
        (with_options, ValueError, "minidist's groups have no options: leave pg_options out"),
        (as_another_rank, ValueError, "rank=0, but it is 1: leave rank out"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(
    program: object, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        minidist.run(program, 2, torch=True)  # type: ignore[arg-type]


def test_tensors_can_be_resized_after_they_have_travelled() -> None:
    def program(comm: Communicator) -> list[int]:
        dist.init_process_group("minidist")
        tensor, whole = torch.ones(4), torch.empty(8)
        dist.all_reduce(tensor)
        dist.all_gather_single(whole, tensor)
        tensor.resize_(16)  # as PowerSGD does with a bucket
        whole.untyped_storage().resize_(0)  # as FSDP frees what it has gathered
        return [tensor.untyped_storage().nbytes(), whole.untyped_storage().nbytes()]

    assert minidist.run(program, 2, torch=True) == [[64, 0]] * 2


def test_a_state_of_rank_0_is_loaded_on_all_ranks() -> None:
    def program(comm: Communicator) -> bool:
        dist.init_process_group("minidist")
        net = fully_shard(nn.Linear(3, 5))
        state = {"weight": torch.arange(15.0).view(5, 3), "bias": torch.ones(5)}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(net, {} if comm.rank else dict(state), options=options)
        whole = {name: each.full_tensor() for name, each in net.state_dict().items()}
        return all(torch.equal(whole[name], state[name]) for name in state)

    assert minidist.run(program, 2, torch=True) == [True] * 2


def test_who_polls_a_collective_lets_the_others_go_on() -> None:
    def program(comm: Communicator) -> float:
        dist.init_process_group("minidist")
        one = torch.ones(1)
        work = dist.all_reduce(one, async_op=True)
        while work is not None and not work.is_completed():
            pass
        return float(one)

    assert minidist.run(program, 2, torch=True, engine="cooperative", limit=5) == [2, 2]


def test_a_monitored_barrier_says_who_has_not_come() -> None:
    def program(comm: Communicator) -> None:
        dist.init_process_group("gloo")
        dist.monitored_barrier()
        if comm.rank:
            dist.monitored_barrier(wait_all_ranks=True)

    with pytest.raises(DeadlockError, match="rank 1 waits for rank 0, which has finished"):
        minidist.run(program, 2, torch=True)
