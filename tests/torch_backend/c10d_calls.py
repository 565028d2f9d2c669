"""Every call of torch.distributed, each against what it has to give: a program, for ranks of any
kind. `mpirun -n 3 python tests/torch_backend/c10d_calls.py`
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.two_tensor import TwoTensor


def base(rank: int) -> Tensor:
    return torch.arange(6.0).view(2, 3) + rank


def every_call(_: object = None) -> str:
    dist.init_process_group("minidist")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    reductions(rank, ranks)
    gathers(rank, ranks)
    exchanges(rank, ranks)
    objects(rank, ranks)
    messages(rank, ranks)
    groups(rank, ranks)
    functional_calls(rank, ranks)
    subclasses_and_modes(rank, ranks)
    inference(rank, ranks)
    refused_on_every_rank(ranks)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("minidist")  # again
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == ranks
    dist.destroy_process_group()
    return "every call"


def reductions(rank: int, ranks: int) -> None:
    mine, everyones = base(rank), torch.stack([base(other) for other in range(ranks)])
    expected = {
        ReduceOp.SUM: everyones.sum(0),
        ReduceOp.AVG: everyones.mean(0),
        ReduceOp.PRODUCT: everyones.prod(0),
        ReduceOp.MIN: everyones.amin(0),
        ReduceOp.MAX: everyones.amax(0),
    }
    for op, result in expected.items():
        strided = torch.empty(3, 2).t().copy_(mine)
        assert not strided.is_contiguous()
        dist.all_reduce(strided, op)
        torch.testing.assert_close(strided, result)
        reduced = mine.clone()
        dist.reduce(reduced, dst=ranks - 1, op=op)
        torch.testing.assert_close(reduced, result if rank == ranks - 1 else mine)
        part = torch.empty(3)
        dist.reduce_scatter(part, [torch.full((3,), rank + other + 1.0) for other in range(ranks)])
        assert torch.equal(
            part, torch.full((3,), sum(rank + other + 1.0 for other in range(ranks)))
        )
    with raised(NotImplementedError, "PREMUL_SUM"):  # as gloo says
        dist.all_reduce(mine.clone(), dist._make_nccl_premul_sum(2.0))
    wave = torch.complex(mine, -mine)
    dist.all_reduce(wave)
    assert torch.equal(wave, torch.complex(expected[ReduceOp.SUM], -expected[ReduceOp.SUM]))
    half = mine.bfloat16()
    dist.all_reduce(half)
    assert torch.equal(half, expected[ReduceOp.SUM].bfloat16())
    nothing = torch.empty(0)
    dist.all_reduce(nothing)
    later = mine.clone()
    work = dist.all_reduce(later, async_op=True)
    future = work.get_future().then(lambda done: 2 * done.value()[0])
    assert torch.equal(future.wait(), 2 * expected[ReduceOp.SUM])
    assert work.is_completed()
    whole = torch.stack([base(rank) + 10 * other for other in range(ranks)]).flatten(0, 1)
    shard = torch.empty(2, 3)
    dist.reduce_scatter_single(shard, whole)
    assert torch.equal(shard, expected[ReduceOp.SUM] + 10 * rank * ranks)
    parts = [torch.full((2,), float(number)) for number in range(3)]
    with dist._coalescing_manager(async_ops=True) as together:
        for part in parts:
            dist.all_reduce(part)
    together.wait()
    assert [part[0].item() for part in parts] == [0, ranks, 2 * ranks]

    bits = torch.arange(16).reshape(4, 4) * 5 % 16  # a row for each of at most four ranks
    for op, join in (
        (ReduceOp.BAND, torch.bitwise_and),
        (ReduceOp.BOR, torch.bitwise_or),
        (ReduceOp.BXOR, torch.bitwise_xor),
    ):
        for rows in (bits[:ranks], bits[:ranks] > 7):
            mine = rows[rank].clone()
            dist.all_reduce(mine, op)
            assert torch.equal(mine, reduce(join, rows)), f"{op} of {rows.dtype}"


def gathers(rank: int, ranks: int) -> None:
    mine, everyones = base(rank), [base(other) for other in range(ranks)]
    moved = mine.clone()
    dist.broadcast(moved, src=ranks - 1)
    assert torch.equal(moved, everyones[-1])
    gathered = [torch.empty(3, 2).t() for _ in range(ranks)]
    dist.all_gather(gathered, mine)
    assert all(torch.equal(one, other) for one, other in zip(gathered, everyones, strict=True))
    uneven = [torch.empty(other) for other in range(ranks)]
    dist.all_gather(uneven, torch.full((rank,), float(rank)))
    assert [one.tolist() for one in uneven] == [[float(o)] * o for o in range(ranks)]
    whole = torch.empty(2 * ranks, 3)
    dist.all_gather_single(whole, mine)
    assert torch.equal(whole, torch.cat(everyones))
    eight = torch.empty(2 * ranks, 3, dtype=torch.float8_e4m3fn)
    dist.all_gather_single(eight, mine.to(torch.float8_e4m3fn))
    assert torch.equal(eight.float(), torch.cat(everyones))
    targets = [torch.empty(2, 3) for _ in range(ranks)] if rank == 1 else None
    dist.gather(mine, targets, dst=1)
    assert targets is None or all(map(torch.equal, targets, everyones))
    truth = torch.empty(3, dtype=torch.bool)
    given = [torch.arange(3) == other for other in range(ranks)] if rank == 0 else None
    dist.scatter(truth, given, src=0)
    assert torch.equal(truth, torch.arange(3) == rank)


def exchanges(rank: int, ranks: int) -> None:
    arriving = [torch.empty(other + 1) for other in range(ranks)]
    leaving = [torch.full((rank + 1,), 10.0 * rank + other) for other in range(ranks)]
    dist.all_to_all(arriving, leaving)
    assert [one.tolist() for one in arriving] == [
        [10.0 * other + rank] * (other + 1) for other in range(ranks)
    ]
    even = torch.empty(ranks, 2)
    dist.all_to_all_single(even, torch.full((ranks, 2), float(rank)))
    assert torch.equal(even, torch.arange(float(ranks))[:, None].expand(ranks, 2))
    sizes = list(range(ranks))  # `other` rows go to rank `other`
    uneven = torch.empty(rank * ranks, 2)
    sent = torch.full((sum(sizes), 2), float(rank))
    dist.all_to_all_single(uneven, sent, [rank] * ranks, sizes)
    assert torch.equal(uneven[:, 0], torch.arange(float(ranks)).repeat_interleave(rank))


def objects(rank: int, ranks: int) -> None:
    everyones: list[object] = [None] * ranks
    dist.all_gather_object(everyones, {"rank": rank})
    assert everyones == [{"rank": other} for other in range(ranks)]
    listed = [rank, "text"]
    dist.broadcast_object_list(listed, src=1)
    assert listed == [1, "text"]
    gathered = [None] * ranks if rank == 0 else None
    dist.gather_object(rank, gathered, dst=0)
    assert gathered in (None, list(range(ranks)))
    mine: list[object] = [None]
    dist.scatter_object_list(mine, list(range(ranks)) if rank == 0 else None, src=0)
    assert mine == [rank]


def messages(rank: int, ranks: int) -> None:
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    into = torch.empty(6)[::2]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.full((3,), float(rank)), after),
            dist.P2POp(dist.irecv, into, before),
        ]
    )
    for work in works:
        work.wait()
    assert into.tolist() == [before] * 3
    if rank == 0:  # by tag, the second before the first
        works = [dist.isend(torch.full((1,), float(tag)), 1, tag=tag) for tag in (5, 6)]
        for work in works:
            work.wait()
        dist.send_object_list(["hello"], 1)
    if rank == 1:
        first, second = torch.empty(1), torch.empty(1)
        assert dist.recv(second, 0, tag=6) == 0
        dist.recv(first, 0, tag=5)
        assert (first.item(), second.item()) == (5, 6)
        heard: list[object] = [None]
        dist.recv_object_list(heard, 0)
        assert heard == ["hello"]
    first, second = torch.empty(2), torch.empty(2)
    works = [dist.irecv(first, rank), dist.irecv(second, rank)]
    works += [dist.isend(torch.full((2,), value), rank) for value in (7.0, 8.0)]
    for work in reversed(works):
        work.wait()
    assert (first.tolist(), second.tolist()) == ([7, 7], [8, 8]), "to itself, in order"
    with raised(NotImplementedError, "no receive from any source"):
        dist.recv(torch.empty(1))


def groups(rank: int, ranks: int) -> None:
    for members in ([0, 1], [0, ranks - 1]):
        group = dist.new_group(members)
        if rank in members:
            number = torch.tensor([rank])
            dist.all_reduce(number, group=group)
            assert number.item() == sum(members)
    if rank in (0, ranks - 1):  # the others know nothing of it
        group = dist.new_group([0, ranks - 1], use_local_synchronization=True)
        dist.barrier(group=group)
    if ranks % 2 == 0:
        mesh = dist.init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("outer", "inner"))
        number = torch.tensor([rank])
        dist.all_reduce(number, group=mesh.get_group("inner"))
        row = rank // (ranks // 2)
        assert number.item() == sum(range(row * ranks // 2, (row + 1) * ranks // 2))


def functional_calls(rank: int, ranks: int) -> None:
    mine, world = base(rank), dist.group.WORLD
    everyones = [base(other) for other in range(ranks)]
    assert torch.equal(functional.all_reduce(mine, "sum", world) + 0, sum(everyones, 0 * mine))
    gathered = functional.all_gather_single(mine, 0, world)
    assert torch.equal(gathered + 0, torch.cat(everyones))
    reduced = functional.reduce_scatter_single(torch.ones(2 * ranks, 3), "sum", 0, world)
    assert torch.equal(reduced + 0, torch.full((2, 3), float(ranks)))
    exchanged = functional.all_to_all_single(torch.full((ranks,), float(rank)), None, None, world)
    assert torch.equal(exchanged + 0, torch.arange(float(ranks)))
    whole, ops = torch.empty(2 * ranks, 3), torch.ops._c10d_functional
    ops.wait_tensor(ops.all_gather_into_tensor_out(mine, ranks, world.group_name, out=whole))
    assert torch.equal(whole, torch.cat(everyones))


def two(value: float, size: int = 2) -> TwoTensor:
    """Return a tensor that has no memory of its own, only that of two others."""
    return TwoTensor(torch.full((size,), value), torch.full((size,), 10 * value))


def holds(tensor: Any, *values: float) -> bool:
    both = tensor.a.tolist(), tensor.b.tolist()
    return both == ([*values], [10 * value for value in values])


def subclasses_and_modes(rank: int, ranks: int) -> None:
    total = ranks * (ranks + 1) / 2
    reduced, moved, received = two(rank + 1.0), two(rank + 1.0), two(0.0)
    dist.all_reduce(reduced)
    dist.broadcast(moved, src=1)
    assert holds(reduced, total, total) and holds(moved, 2, 2)
    gathered, whole = [two(0.0) for _ in range(ranks)], two(0.0, 2 * ranks)
    dist.all_gather(gathered, two(float(rank)))
    dist.all_gather_single(whole, two(float(rank)))
    assert all(holds(each, other, other) for other, each in enumerate(gathered))
    assert holds(whole, *(other for other in range(ranks) for _ in range(2)))
    given = [two(float(other)) for other in range(ranks)] if rank == 0 else None
    dist.scatter(received, given, src=0)
    assert holds(received, rank, rank)
    if rank == 0:
        dist.send(two(7.0), 1)
    elif rank == 1:
        dist.recv(received, 0)
        assert holds(received, 7, 7)
    mesh = dist.init_device_mesh("cpu", (ranks,))
    with raised(NotImplementedError, "c10d.allreduce_.default does not have a sharding strategy"):
        dist.all_reduce(distribute_tensor(torch.ones(ranks), mesh, [Shard(0)]))
    with CommDebugMode() as mode:
        dist.all_reduce(torch.ones(2))
        dist.all_gather_single(torch.empty(2 * ranks), torch.ones(2))
        dist.reduce_scatter_single(torch.empty(2), torch.ones(2 * ranks))
    assert mode.get_total_counts() == 3


def inference(rank: int, ranks: int) -> None:
    with torch.inference_mode():
        strided = torch.ones(2, 3).t()
        gathers(rank, ranks)
        exchanges(rank, ranks)
        objects(rank, ranks)
        messages(rank, ranks)
        dist.all_reduce(strided)
        part = torch.empty(2)
        dist.reduce_scatter_single(part, torch.ones(2 * ranks))
        assert part.tolist() == [ranks] * 2
    dist.all_reduce(strided)
    assert torch.equal(strided, torch.full((3, 2), float(ranks**2)))


def refused_on_every_rank(ranks: int) -> None:
    """A rank may catch what it is refused, and go on."""
    for call in (
        lambda: dist.broadcast(torch.ones(1), src=ranks),
        lambda: dist.reduce(torch.ones(1), dst=-1),
        lambda: dist.gather(torch.ones(1), None, dst=ranks),
        lambda: dist.scatter(torch.ones(1), None, src=ranks),
    ):
        with raised(ValueError, "is not a rank"):
            call()
    with raised(ValueError, "an expanded tensor of shape"):
        dist.all_reduce(torch.ones(1).expand(3))
    with raised(ValueError, "the negative bit"):
        dist.all_reduce(torch.ones(3, dtype=torch.complex64).conj().imag)


@contextmanager
def raised(kind: type[Exception], words: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"nothing was said of: {words}")


if __name__ == "__main__":
    import minidist.torch_backend  # noqa: F401

    print(every_call())
