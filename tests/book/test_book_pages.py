"""Pages that `train` does not run as a whole: 1F1B by hand, experts, slow wires, a random function."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from minidist import checkpoint, expert, moe, recompute, slow_wires
from minidist.comm import Communicator
from minidist.context import ring_attention
from minidist.model import causal_attention
from minidist.pipeline import Pipeline, gpipe, one_f_one_b, one_forward_one_backward
from minidist.precision import MixedPrecision
from minidist.tensor import Block
from minidist.threads import run


def random(*sizes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (2, 5), (3, 3), (4, 8), (4, 2)])
def test_1f1b_by_hand_and_the_schedules_give_the_serial_gradients(ranks: int, count: int) -> None:
    layers, inputs = random(ranks, 5, 5, seed=1), random(count, 2, 5)

    def loss_of(y: Tensor, microbatch: int) -> Tensor:
        return (y * (microbatch + 1)).square().sum()

    serial = layers.clone().requires_grad_()
    for microbatch, y in enumerate(inputs):
        for layer in serial:
            y = (y @ layer).tanh()
        loss_of(y, microbatch).backward()  # type: ignore[no-untyped-call]

    def program(comm: Communicator, kind: str) -> None:
        own, done = layers[comm.rank].clone().requires_grad_(), []

        def forward(x: Tensor, microbatch: int) -> Tensor:
            y = (x @ own).tanh()
            done.append(f"F{microbatch}")
            y.register_hook(lambda _: done.append(f"B{microbatch}"))
            return loss_of(y, microbatch) if comm.rank == ranks - 1 else y

        schedule = {"gpipe": gpipe, "1f1b": one_f_one_b}.get(kind, one_f_one_b)(ranks, count)
        if kind == "by hand":
            one_forward_one_backward(forward, list(inputs), inputs[0], comm)
        else:
            *others, last = schedule[comm.rank]
            pipeline = Pipeline(comm)
            pipeline.run(others, forward, list(inputs), inputs[0])
            pipeline.run([last], forward, list(inputs), inputs[0])
        torch.testing.assert_close(own.grad, serial.grad[comm.rank], rtol=1e-9, atol=1e-12)
        assert done == [str(action) for action in schedule[comm.rank]]
        edges = (comm.rank > 0) + (comm.rank < ranks - 1)
        assert comm.traffic.messages == count * edges

    for kind in ("by hand", "gpipe", "1f1b"):
        run(program, ranks, kind)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ring_attention_is_attention(ranks: int, kv_heads: int) -> None:
    query, gradient = random(2, 4, 6, 3), random(2, 4, 6, 3, seed=1)
    key, value = random(2, kv_heads, 6, 3, seed=2), random(2, kv_heads, 6, 3, seed=3)
    whole = [each.clone().requires_grad_() for each in (query, key, value)]
    output = causal_attention(*whole)
    output.backward(gradient)  # type: ignore[no-untyped-call]

    def program(comm: Communicator) -> None:
        def own(x: Tensor) -> Tensor:
            return x.chunk(ranks, 2)[comm.rank]

        parts = [own(each).clone().requires_grad_() for each in (query, key, value)]
        found = ring_attention(*parts, comm)
        found.backward(own(gradient))  # type: ignore[no-untyped-call]
        torch.testing.assert_close(found, own(output), rtol=1e-9, atol=1e-12)
        for part, each in zip(parts, whole, strict=True):
            assert each.grad is not None
            torch.testing.assert_close(part.grad, own(each.grad), rtol=1e-9, atol=1e-12)

    run(program, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_experts_of_all_ranks_are_the_mixture(ranks: int) -> None:
    x, router, weights = random(8, 5), random(4, 5, seed=1), random(4, 5, 5, seed=2)

    def experts_of(matrices: Tensor) -> list[expert.Expert]:
        return [lambda x, matrix=matrix: x @ matrix for matrix in matrices]

    serial = [each.clone().requires_grad_() for each in (x, router, weights)]
    wanted, _ = moe.mixture(serial[0], serial[1], experts_of(serial[2]), 2)
    wanted.square().sum().backward()  # type: ignore[no-untyped-call]

    def program(comm: Communicator) -> None:
        own = [each.chunk(ranks)[comm.rank].clone().requires_grad_() for each in (x, weights)]
        found = expert.mixture_across(own[0], router, experts_of(own[1]), 2, comm)
        found.square().sum().backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(found, wanted.chunk(ranks)[comm.rank])
        for part, each in zip(own, (serial[0], serial[2]), strict=True):
            assert each.grad is not None
            torch.testing.assert_close(part.grad, each.grad.chunk(ranks)[comm.rank])

    run(program, ranks)


def test_top_k_loses_nothing_and_sends_what_it_says() -> None:
    def program(comm: Communicator) -> Tensor:
        gradients, residual = random(5, 40, seed=comm.rank), torch.zeros(40, dtype=torch.float64)
        sent = torch.zeros_like(residual)
        for gradient in gradients:
            step = gradient.clone()
            slow_wires.sparse_all_reduce(step, residual, 4, comm)
            sent += step
        assert comm.traffic.bytes == 5 * (comm.size - 1) * 4 * (4 + 8)
        everything = sum(random(5, 40, seed=rank).sum(0) for rank in range(comm.size))
        return torch.stack((residual, everything - sent))

    ends = run(program, 3)
    left = sum(residual for residual, _ in ends)
    for _, missing in ends:
        torch.testing.assert_close(missing, left)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_diloco_takes_the_outer_step_of_the_paper(momentum: float) -> None:
    def program(comm: Communicator) -> float:
        x = nn.Parameter(torch.zeros(1))
        sites = slow_wires.DiLoCo([x], comm, every=2, lr=0.5, momentum=momentum)
        for _ in range(4):
            x.data -= comm.rank + 1
            sites.stepped()
        return x.item()

    x, velocity = 0.0, 0.0
    for _ in range(2):
        change = 3.0  # the mean of 2 * 1 and 2 * 2
        velocity = momentum * velocity + change
        x -= 0.5 * (change + momentum * velocity)
    assert run(program, 2) == pytest.approx([x, x])


@pytest.mark.parametrize(("delay", "diverges"), [(1, False), (2, True)])
def test_delayed_gradients_diverge_earlier(delay: int, diverges: bool) -> None:
    part = nn.Linear(1, 1, bias=False)
    nn.init.ones_(part.weight)
    optimizer = torch.optim.SGD(part.parameters(), lr=1.5)
    losses = slow_wires.train_delayed(
        [part], [delay], range(40), lambda _: part.weight.square().sum() / 2, [optimizer]
    )
    assert (losses[-1] > losses[0]) == diverges
    if delay == 2:  # x(t + 1) = x(t) - lr x(t - 1), and the loss is that of x(t - 1)
        x = [1.0, 1.0]
        for _ in range(39):
            x.append(x[-1] - 1.5 * x[-2])
        assert losses == pytest.approx([each**2 / 2 for each in x[:40]])


def test_a_random_function_is_recomputed_with_the_same_numbers() -> None:
    weight, x = nn.Parameter(random(5, 5)), random(3, 5, seed=1)
    frozen = nn.Parameter(random(5, 5, seed=2), requires_grad=False)
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(torch.is_grad_enabled())
        return nn.functional.dropout(x @ weight @ frozen, 0.5).square()

    torch.manual_seed(0)
    function(x).sum().backward()  # type: ignore[no-untyped-call]
    wanted, weight.grad = weight.grad, None
    torch.manual_seed(0)
    y = recompute.checkpoint(function, x, [weight, frozen])
    later = torch.rand(1)
    torch.manual_seed(7)
    now = torch.rand(1)
    torch.manual_seed(7)
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert calls == [True, False, True] and frozen.grad is None and later != now
    assert torch.equal(torch.rand(1), now), "the generator goes on as if nothing had been drawn"
    torch.testing.assert_close(weight.grad, wanted)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_piece_is_saved_once_and_read_by_any_ranks(ranks: int, tmp_path: Path) -> None:
    whole, norm = torch.arange(24.0).view(4, 6), torch.arange(5.0)

    def pieces_of(rank: int, ranks: int, of: Tensor, copy: Tensor) -> list[checkpoint.Piece]:
        columns = np.array_split(np.arange(6), ranks)[rank]
        block = Block((4, 6), 1, int(columns[0]), int(columns[-1]) + 1)
        values = of[:, columns].flatten()
        halves = [(0, values[:3]), (3, values[3:])]  # as if dealt out once more
        pieces = [checkpoint.Piece("weight", block, start, part) for start, part in halves]
        return [*pieces, checkpoint.Piece("norm", Block((5,), 0, 0, 5), 0, copy)]

    def program(comm: Communicator) -> None:
        pieces = pieces_of(comm.rank, ranks, whole, norm)
        checkpoint.save(tmp_path, 3, pieces, {"scale": 2.0}, comm)

    run(program, ranks)
    with pytest.raises(FileExistsError, match="save to another folder"):
        run(program, ranks)
    path = checkpoint.newest(tmp_path)
    saved = [piece for file in path.glob("rank-*.pt") for piece in torch.load(file)]
    assert sum(len(tensor) for *_, tensor in saved) == 24 + 5
    for rank in range(2):
        wanted = pieces_of(rank, 2, torch.zeros(4, 6), torch.zeros(5))
        assert checkpoint.load(path, wanted) == {"step": 3, "scale": 2.0}
        for found, right in zip(wanted, pieces_of(rank, 2, whole, norm), strict=True):
            assert torch.equal(found.tensor, right.tensor)
    missing = checkpoint.Piece("head", Block((5,), 0, 0, 5), 0, norm)
    with pytest.raises(KeyError, match="has no head"):
        checkpoint.load(path, [missing])


def test_a_step_with_an_infinite_gradient_is_skipped_on_all_ranks() -> None:
    def program(comm: Communicator) -> tuple[float, bool, bool]:
        weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
        mixed = MixedPrecision([weight], 0.1, comm)
        weight.grad = torch.full((2,), torch.inf if comm.rank else 1.0, dtype=torch.float16)
        skipped = not mixed.step() and bool((weight == 1).all())
        weight.grad = torch.ones(2, dtype=torch.float16)
        return mixed.scale, skipped, mixed.step() and bool((weight < 1).all())

    assert run(program, 2) == [(2.0**15, True, True)] * 2
