"""DDP is what it says: buckets in registered memory, reduced while backward runs, in one order, for
the least bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from data_parallel import CONFIG, VARIANTS, Case, build, wrap
from torch import Tensor, nn

import minidist
from minidist.full import DDP, DataParallel, NaiveDataParallel, ParameterServer
from minidist.full.collectives import all_reduce
from minidist.full.comm import Cluster, Communicator
from minidist.full.ddp.buckets import Bucket, BucketState, partition
from minidist.full.model import cross_entropy_sum
from minidist.full.trace import Trace

HIDDEN = 120  # divides by 2, 3, 4 and 5
LAYERS = 5
LAYER_BYTES = HIDDEN * HIDDEN * 4
all_variants = pytest.mark.parametrize("variant", VARIANTS)


def tower(device: str = "cpu") -> nn.Sequential:
    """Square matrices, one after the other: backward finishes them in reverse order."""
    return nn.Sequential(
        *(nn.Linear(HIDDEN, HIDDEN, bias=False, device=device) for _ in range(LAYERS))
    )


def wrap_tower(
    comm: Communicator, variant: type[DataParallel], model: nn.Module, layers: int
) -> DataParallel:
    """Have DDP make buckets of so many layers."""
    sizes = {"bucket_bytes": layers * LAYER_BYTES, "first_bucket_bytes": LAYER_BYTES}
    return variant(model, comm, op="sum", **(sizes if variant is DDP else {}))  # type: ignore[arg-type]


# ---- overlap, on a modelled machine whose clock says exactly who waited for whom ----


class Work(torch.autograd.Function):
    """The identity, whose backward takes a second of virtual time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        with ctx.comm.span("layer", "compute"):
            ctx.comm.advance(1.0)
        return gradients[0], None


def slow_tower(comm: Communicator, variant: type[DataParallel], device: str) -> float:
    """Run one step of a tower with a bucket a layer; return the virtual time it took."""
    model = tower(device)
    wrapped = wrap_tower(comm, variant, model, layers=1)
    started = comm.clock()
    x = torch.ones(2, HIDDEN, device=device)
    for layer in model:
        x = Work.apply(layer(x), comm)
    x.sum().backward()
    wrapped.synchronize()
    return comm.clock() - started


def check_overlap(variant: type[DataParallel], device: str, seconds: float) -> None:
    """Assert that a layer's all-reduce of `seconds` runs beside the computing of the layers before
    it.
    """
    cluster, trace = Cluster.uniform(latency=0, bandwidth=LAYER_BYTES / seconds), Trace()
    took = minidist.run(
        lambda comm: slow_tower(comm, variant, device), ranks=2, cluster=cluster, trace=trace
    )
    launched = ended = 0.0
    for _ in range(LAYERS):  # a queue: a bucket starts when it is complete, and the wire free
        launched += 1.0
        ended = max(ended, launched) + seconds
    assert took == pytest.approx([ended] * 2, rel=1e-12)
    for rank in (0, 1):
        events = [event for event in trace.events if event.rank == rank]
        computing = [event for event in events if event.name == "layer"]
        reductions = [event for event in events if event.name.startswith("all_reduce")]
        assert len(reductions) == LAYERS
        assert min(event.start for event in reductions) < max(event.end for event in computing)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("seconds", [0.5, 1.0, 3.0])
def test_buckets_are_reduced_while_backward_computes(device: str, seconds: float) -> None:
    check_overlap(DDP, device, seconds)


@pytest.mark.parametrize("variant", [NaiveDataParallel, ParameterServer])
def test_what_reduces_after_backward_does_not_pass_for_ddp(variant: type[DataParallel]) -> None:
    with pytest.raises(AssertionError):
        check_overlap(variant, "cpu", 1.0)


# ---- order ----


class Recorder:
    """A stream that notes what is launched."""

    def __init__(self, stream: Any, log: list[str], reductions: list[Any]) -> None:
        self.stream, self.comm, self.log = stream, stream.comm, log
        self.reductions = reductions

    def launch(self, work: Callable[..., Any], *args: Any) -> Any:
        self.log.append(f"bucket {self.reductions.index(work)}")
        return self.stream.launch(work, *args)


def recorded(comm: Communicator, first_layer: int) -> list[str]:
    """Run two branches of two layers, `first_layer`'s branch first, and return what happened during
    backward.
    """
    log: list[str] = []
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: log.append(f"gradient {name[0]}")
        )
    ddp = DDP(model, comm, op="sum", bucket_bytes=1, first_bucket_bytes=1)
    ddp.stream = Recorder(ddp.stream, log, [*ddp.reductions.values()])  # type: ignore[assignment]
    x, total = torch.ones(1, 8), torch.zeros(())
    for start in (first_layer, (first_layer + 2) % 4):
        total = total + model[start + 1](model[start](x)).sum()
    total.backward()
    log.append("backward returned")
    return log


def test_buckets_are_launched_in_the_same_order_whatever_is_finished_first() -> None:
    straight, crossed = minidist.run(
        lambda comm: recorded(comm, first_layer=2 * comm.rank), ranks=2
    )
    assert straight == [
        *("gradient 3", "bucket 0", "gradient 2", "bucket 1"),
        *("gradient 1", "bucket 2", "gradient 0", "bucket 3", "backward returned"),
    ]
    assert crossed == [
        *("gradient 1", "gradient 0", "gradient 3", "bucket 0"),
        *("gradient 2", "bucket 1", "bucket 2", "bucket 3", "backward returned"),
    ]


# ---- buckets ----


def sizes_of(parts: list[list[nn.Parameter]]) -> list[list[int]]:
    return [[parameter.numel() for parameter in part] for part in parts]


def parameters_of(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def test_partition_deals_in_order_and_closes_what_is_full() -> None:
    assert sizes_of(
        partition(parameters_of(1, 2, 3, 4, 9, 1, 1), bucket_bytes=24, first_bytes=8)
    ) == [
        *([1, 2], [3, 4], [9], [1, 1]),
    ]
    assert sizes_of(partition(parameters_of(5, 5), bucket_bytes=8, first_bytes=8)) == [[5], [5]]
    assert sizes_of(partition(parameters_of(5, 5), bucket_bytes=10**9, first_bytes=10**9)) == [
        [5, 5]
    ]
    assert partition([], 8, 8) == []


def test_partition_keeps_precisions_apart() -> None:
    mixed = [*parameters_of(2, 2), *parameters_of(3, dtype=torch.bfloat16), *parameters_of(4)]
    assert sizes_of(partition(mixed, bucket_bytes=100, first_bytes=100)) == [[2, 2], [3], [4]]


def test_buckets_go_from_the_last_parameter_to_the_first_and_the_first_is_small() -> None:
    def program(comm: Communicator) -> list[list[str]]:
        ddp = wrap_tower(comm, DDP, tower(), layers=2)
        return [
            [ddp.names[parameter] for parameter in bucket.parameters]
            for bucket in ddp.reducer.buckets
        ]  # type: ignore

    for names in minidist.run(program, 2):
        assert names == [["4.weight"], ["3.weight", "2.weight"], ["1.weight", "0.weight"]]


def inside(gradient: Tensor, bucket: Any) -> bool:
    start, end = bucket.flat.data_ptr(), bucket.flat.data_ptr() + bucket.flat.nbytes
    return start <= gradient.data_ptr() and gradient.data_ptr() + gradient.nbytes <= end


@pytest.mark.parametrize("set_to_none", [None, False, True])
def test_gradients_live_in_the_buckets_and_buckets_in_registered_memory(
    set_to_none: bool | None,
) -> None:
    def program(comm: Communicator) -> None:
        model = build(CONFIG, seed=0)
        ddp = wrap(model, comm, Case())
        assert isinstance(ddp, DDP)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
        for _ in range(2):
            optimizer.zero_grad(set_to_none) if set_to_none is not None else ddp.zero_grad()
            cross_entropy_sum(
                ddp(torch.ones(1, 8, dtype=torch.int64)), torch.ones(1, 8, dtype=torch.int64)
            ).backward()
            gradients = [parameter.grad for parameter in ddp.parameters_to_reduce]
            assert len(gradients) == len(list(model.parameters())) - 1, "all but the frozen one"
            for parameter, gradient in zip(ddp.parameters_to_reduce, gradients, strict=True):
                assert gradient is not None and inside(gradient, ddp.reducer.bucket_of[parameter])
            assert sum(bucket.flat.nbytes for bucket in ddp.reducer.buckets) == sum(
                g.nbytes for g in gradients if g is not None
            )
        for bucket in ddp.reducer.buckets:
            for seen_from in (comm, ddp.stream.comm):
                peers = seen_from.peers(bucket.flat.numpy())
                assert peers is not None and len(peers) == comm.size
                assert peers[comm.rank].ctypes.data == bucket.flat.data_ptr()

    minidist.run(program, 3)


def test_a_bucket_that_is_used_out_of_turn_says_so() -> None:
    def program(comm: Communicator) -> list[BucketState]:
        first, second = parameters_of(2, 3)
        bucket, states = Bucket([first, second], comm, comm), []
        stream = comm.stream()

        def reduce(bucket: Bucket) -> Any:
            return stream.launch(all_reduce, bucket.take(), stream.comm)

        def refuses(verb: Callable[[], object], said: str) -> None:
            with pytest.raises(RuntimeError, match=f"{said}.* reduced twice or not at all"):
                verb()

        refuses(bucket.wait, "that is filling cannot be waited for")
        for _ in range(2):
            bucket.refill()
            states.append(bucket.state)
            assert not bucket.complete
            bucket.mark_ready(second), bucket.mark_ready(first)
            assert bucket.complete
            bucket.launch(reduce)
            states.append(bucket.state)
            refuses(partial(bucket.mark_ready, first), "that is launched cannot take one more")
            refuses(partial(bucket.launch, reduce), "that is launched cannot be launched")
            bucket.wait()
            bucket.wait()
            states.append(bucket.state)
            refuses(partial(bucket.mark_ready, first), "that is done cannot take one more")
        return states

    life = [BucketState.FILLING, BucketState.LAUNCHED, BucketState.DONE]
    assert minidist.run(program, 2) == [life * 2] * 2


# ---- messages and bytes ----


def one_step(
    comm: Communicator, variant: type[DataParallel], model: nn.Module, width: int
) -> tuple[int, int]:
    """Return the bytes sent in one step, and what a microbatch under `no_sync` sent before it."""
    wrapped = wrap_tower(comm, variant, model, layers=2)
    before = comm.traffic.bytes, comm.traffic.messages
    with wrapped.no_sync():
        wrapped(torch.ones(2, width)).sum().backward()
    quiet = comm.traffic.bytes
    assert (quiet, comm.traffic.messages) == before
    wrapped(torch.ones(2, width)).sum().backward()
    wrapped.synchronize()
    return comm.traffic.bytes - quiet, quiet - before[0]


def reductions(trace: Trace, rank: int) -> int:
    return sum(event.rank == rank and event.name.startswith("all_reduce") for event in trace.events)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize(("variant", "expected"), [(DDP, 3), (NaiveDataParallel, LAYERS)])
def test_every_rank_sends_the_optimal_number_of_bytes(
    variant: type[DataParallel], expected: int, ranks: int
) -> None:
    trace = Trace()
    sent = minidist.run(lambda comm: one_step(comm, variant, tower(), HIDDEN), ranks, trace=trace)
    optimal = 2 * (ranks - 1) * LAYERS * LAYER_BYTES // ranks
    assert sent == [(optimal, 0)] * ranks
    assert [reductions(trace, rank) for rank in range(ranks)] == [expected] * ranks


@pytest.mark.parametrize("ranks", [3, 5, 7])
@pytest.mark.parametrize("variant", [DDP, NaiveDataParallel])
def test_all_ranks_together_send_the_same_where_sizes_do_not_divide(
    variant: type[DataParallel], ranks: int
) -> None:
    def program(comm: Communicator) -> tuple[int, int]:
        model = nn.Sequential(nn.Linear(101, 103, bias=False), nn.Linear(103, 97, bias=False))
        return one_step(comm, variant, model, 101)

    sent = minidist.run(program, ranks)
    assert sum(in_all for in_all, _ in sent) == 2 * (ranks - 1) * 4 * (101 * 103 + 103 * 97)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_parameter_server_sends_to_all_and_all_send_to_it(ranks: int) -> None:
    trace, total = Trace(), LAYERS * LAYER_BYTES
    sent = minidist.run(
        lambda comm: one_step(comm, ParameterServer, tower(), HIDDEN), ranks, trace=trace
    )
    assert sent == [((ranks - 1) * total, 0)] + [(total, 0)] * (ranks - 1)
    assert reductions(trace, 0) == LAYERS


@all_variants
def test_no_sync_keeps_gradients_apart_and_ends_with_its_block(variant: type[DataParallel]) -> None:
    def program(comm: Communicator) -> None:
        model = nn.Linear(3, 1, bias=False)
        wrapped = variant(model, comm, op="sum")
        with pytest.raises(ZeroDivisionError), wrapped.no_sync():
            raise ZeroDivisionError
        with wrapped.no_sync():
            wrapped(torch.full((1, 3), comm.rank + 1.0)).sum().backward()
            with wrapped.no_sync():
                pass
            wrapped(torch.full((1, 3), comm.rank + 1.0)).sum().backward()
        assert model.weight.grad is not None
        assert torch.equal(model.weight.grad, torch.full((1, 3), 2 * (comm.rank + 1.0)))
        wrapped(torch.full((1, 3), comm.rank + 1.0)).sum().backward()
        wrapped.synchronize()
        assert torch.equal(model.weight.grad, torch.full((1, 3), 3 * (1.0 + 2.0 + 3.0)))

    minidist.run(program, 3)
