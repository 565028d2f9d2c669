"""Every page of the book on every wire of `full/`: its communicator is one of the book's.

Started by itself, on 4 ranks or 2, this file takes all steps on whatever launcher has started it.
"""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import mpirun, torchrun
from torch import Tensor, nn

import minidist
from minidist import collectives as C
from minidist.comm import Communicator
from minidist.ddp import DDP
from minidist.expert import mixture_across
from minidist.mesh import Mesh
from minidist.moe import mixture
from minidist.pipeline import one_forward_one_backward
from minidist.ring import ring_all_reduce
from minidist.slow_wires import DiLoCo, sparse_all_reduce
from minidist.train import Options, train, verify
from minidist.zero import PlainZeRO

SMALL = Options(layers=2, hidden=8, heads=4, kv_heads=4, sequence=8, batch=8, steps=1)


def seeded(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ring(comm: Communicator) -> None:
    buffer = torch.arange(7.0) + comm.rank
    ring_all_reduce(buffer.tensor_split(comm.size), comm, operator.iadd)
    assert torch.equal(buffer, comm.size * torch.arange(7.0) + sum(range(comm.size)))


def messages(comm: Communicator) -> None:
    """A barrier, a group in reverse order, a stream, the clock, and what was sent."""
    comm.barrier()
    group = comm.split(comm.rank % 2, key=-comm.rank)
    before, own = group.traffic.bytes, np.full(3, float(comm.rank))
    if group.size > 1:
        group.exchange(own, 1 - group.rank, own.copy(), 1 - group.rank)
    assert group.traffic.bytes - before == (24 if group.size > 1 else 0)
    stream, buffer = comm.stream(), np.ones(5)
    for _ in range(2):
        stream.launch(C.all_reduce, buffer, stream.comm)
    stream.wait()
    assert (buffer == comm.size**2).all()
    began = comm.clock()
    comm.advance(1e-3)
    assert comm.clock() >= began


def collectives(comm: Communicator) -> None:
    ranks = range(comm.size)
    for algorithm in ("ring", "recursive", "tree", "naive"):
        for make in (np.full, torch.full):
            buffer = make((9,), comm.rank + 1.0)
            C.all_reduce(buffer, comm, "max", algorithm)
            assert (buffer == comm.size).all()
    inside, across = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    buffer = np.ones(9)
    C.hierarchical_all_reduce(buffer, inside, across)
    assert (buffer == comm.size).all()
    for algorithm in ("ring", "recursive"):
        shard = C.reduce_scatter(np.arange(8.0), comm, algorithm=algorithm)
        assert np.array_equal(C.all_gather(shard, comm), comm.size * np.arange(8.0))
    sent = np.full(comm.size, comm.rank)
    assert C.all_to_all(sent, comm).tolist() == [*ranks]
    for root in ranks:
        C.broadcast(value := np.full(2, comm.rank), comm, root)
        assert (value == root).all()
        C.reduce(total := np.ones(2), comm, root)
        assert comm.rank != root or (total == comm.size).all()
        gathered = C.gather(np.full(1, comm.rank), comm, root)
        assert comm.rank != root or gathered.tolist() == [*ranks]
        C.scatter(own := np.zeros(1), comm, root, np.arange(comm.size, dtype=float))
        assert own[0] == comm.rank
    assert C.all_gather_object(f"rank {comm.rank}", comm) == [f"rank {rank}" for rank in ranks]


def mesh(comm: Communicator) -> None:
    made = Mesh(comm, {"dp": comm.size // 2, "tp": 2})
    C.all_reduce(total := np.full(1, comm.rank), made["tp"])
    assert total[0] == 2 * (comm.rank // 2 * 2) + 1
    assert made["dp"].rank == made.coordinates["dp"] == comm.rank // 2


def ddp(comm: Communicator) -> None:
    model = nn.Linear(3, 1, dtype=torch.float64)
    wrapped, x = DDP(model, comm, "mean", bucket_bytes=8), seeded(comm.size, 3)
    wrapped(x[comm.rank]).sum().backward()
    wrapped.finish()
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad[0], x.mean(0))


def zero(comm: Communicator) -> None:
    layers, x = [nn.Linear(3, 1, bias=False, dtype=torch.float64)], seeded(comm.size, 3)
    plain = PlainZeRO(layers, comm, stage=2)
    plain.units[0].unshard()
    before = layers[0].weight.detach().clone()
    output = plain.forward(x[comm.rank : comm.rank + 1])
    plain.backward(torch.ones_like(output))
    plain.step(torch.optim.SGD(plain.shards, lr=1.0))
    plain.units[0].unshard()
    torch.testing.assert_close(layers[0].weight, before - x.sum(0))


def trained(comm: Communicator) -> None:
    """DDP, ZeRO, FSDP, tensor, pipeline and context parallelism, recomputing: the whole loop."""
    half = comm.size // 2
    for changes in (
        {"zero": 1, "tp": 2, "dp": half},
        {"zero": 2},
        {"zero": 3, "recompute": True},
        {"tp": 2, "sp": True},
        {"pp": 2, "tp": half, "microbatches": 4, "tied": True},
        {"cp": 2},
    ):
        options = replace(SMALL, **changes)  # type: ignore[arg-type]
        as_serial(options, comm)


def as_serial(options: Options, comm: Communicator) -> None:
    """Train; compare the whole parameters, which all ranks have, with a serial run on one."""
    weights = train(options, comm, talk=False)
    if comm.rank == 0:
        verify(replace(options, resume=""), weights)


def checkpoint(comm: Communicator) -> None:
    (folder, *_) = C.all_gather_object(tempfile.mkdtemp(), comm)
    train(replace(SMALL, pp=2, save=folder), comm, talk=False)
    second = replace(SMALL, steps=2, zero=3, resume=folder)
    as_serial(second, comm)


def pipeline(comm: Communicator) -> None:
    layers = [nn.Linear(2, 2, dtype=torch.float64) for _ in range(comm.size)]
    for number, layer in enumerate(layers):
        nn.init.constant_(layer.weight, 1 + number)
        nn.init.zeros_(layer.bias)
    parts, last = seeded(3, 1, 2).unbind(), comm.rank == comm.size - 1

    def forward(x: Tensor, microbatch: int) -> Tensor:
        y: Tensor = layers[comm.rank](x)
        return (y - parts[microbatch]).square().sum() if last else y

    one_forward_one_backward(forward, parts, torch.empty(1, 2, dtype=torch.float64), comm)
    found, layers[comm.rank].weight.grad = layers[comm.rank].weight.grad, None
    for part in parts:
        (nn.Sequential(*layers)(part) - part).square().sum().backward()
    torch.testing.assert_close(found, layers[comm.rank].weight.grad)


def expert(comm: Communicator) -> None:
    matrices, router = seeded(2 * comm.size, 4, 4, seed=2), seeded(2 * comm.size, 4, seed=3)
    experts = [lambda rows, matrix=matrix: rows @ matrix for matrix in matrices]
    x = seeded(5, 4, seed=comm.rank).requires_grad_()
    own = experts[2 * comm.rank : 2 * comm.rank + 2]
    output = mixture_across(x, router, own, 2, comm)
    output.sum().backward()
    found, x.grad = x.grad, None
    wanted, _ = mixture(x, router, experts, 2)
    wanted.sum().backward()
    torch.testing.assert_close(output, wanted)
    torch.testing.assert_close(found, x.grad)


def slow_wires(comm: Communicator) -> None:
    everyones = [seeded(6, seed=rank) for rank in range(comm.size)]
    gradient, residual = everyones[comm.rank].clone(), torch.zeros(6, dtype=torch.float64)
    sparse_all_reduce(gradient, residual, 2, comm)
    left = C.all_gather(residual, comm).view(comm.size, 6).sum(0)
    torch.testing.assert_close(gradient + left, sum(everyones))
    weight = nn.Parameter(torch.zeros(1))
    outer = DiLoCo([weight], comm, every=1, lr=1.0, momentum=0.0)
    weight.data += comm.rank
    outer.stepped()
    assert weight.item() == (comm.size - 1) / 2


PAGES = (
    ring,
    messages,
    collectives,
    mesh,
    ddp,
    zero,
    trained,
    checkpoint,
    pipeline,
    expert,
    slow_wires,
)


def every_page(comm: Communicator) -> str:
    torch.set_num_threads(1)
    for page in PAGES:
        page(comm)
    return "every page"


WIRES = {
    "threads": {},
    "cooperative": {"engine": "cooperative", "seed": 3},
    "modelled": {"cluster": minidist.Cluster.h100(nodes=1)},
    "debug": {"debug": True, "trace": minidist.Trace()},
}


@pytest.mark.parametrize("options", WIRES.values(), ids=WIRES)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.__name__)
def test_on_simulated_ranks(
    page: Callable[[Communicator], None], options: dict[str, object]
) -> None:
    minidist.run(page, 4, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("start", "ranks"), [(mpirun, 4), (torchrun, 2)])
def test_on_processes(start: Callable[..., object], ranks: int) -> None:
    outcome = start(ranks, __file__, timeout=110)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr  # type: ignore[attr-defined]
    assert outcome.stdout.count("every page") == ranks  # type: ignore[attr-defined]


if __name__ == "__main__":
    print(every_page(minidist.init()))
