"""What users of sharded parameters get wrong: one clear sentence each; never a hang, a crash or a
wrong number.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_fsdp_traps import DOUBLE, Layers, Pair, Pairs, check, rows, squares
from torch import Tensor, nn

import minidist
from minidist.full import DDP, FSDP, MixedPrecision, ZeRO1, ZeRO2
from minidist.full.comm import Communicator, MismatchError


class Aside(Layers):
    def forward(self, x: Tensor, *used: int) -> Any:
        """Use a unit's parameters outside the unit."""
        return self.norm(x @ self.layers[0].weight)


def backward(model: nn.Module, **options: Any) -> None:
    model(rows(0)).square().sum().backward(**options)


def writing(model: FSDP) -> None:
    model.module.load_state_dict(Layers().state_dict())


def twice(comm: Communicator, model: nn.Module, first: Any) -> None:
    wrapped = first(model, comm, op="sum")
    FSDP(wrapped.module, comm, op="sum")


def old_optimizer(comm: Communicator) -> None:
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters())
    FSDP(model, comm, op="sum"), optimizer.step()


class Text(Layers):
    def forward(self, x: Tensor, *used: int) -> Any:
        return "text" if x.shape[0] else None


def by_type(*kinds: type) -> Any:
    return {"policy": lambda module: isinstance(module, kinds)}


def new_optimizer(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(rows(0)).sum().backward()
    optimizer.step()


def sparse(comm: Communicator, kind: Any) -> None:
    """Try a table whose gradient is sparse from the beginning, and one that becomes so later."""
    with pytest.raises(ValueError, match=r"gradient of 0\.weight is sparse") as caught:
        kind(nn.Sequential(nn.Embedding(9, 4, sparse=True)), comm, op="sum")
    assert kind.__name__ in str(caught.value) and not comm.traffic.messages
    wrapped = kind(nn.Sequential(nn.Embedding(9, 4)), comm, op="sum")
    wrapped.module[0].sparse = True
    wrapped(torch.arange(3)).sum().backward()


def of_one(model: FSDP, grad: Callable[[Tensor, list[Any]], object]) -> None:
    grad(model(rows(0)).sum(), [next(model.module.parameters())])


def compiled(model: nn.Module) -> None:
    torch.compile(model, backend="eager")(rows(0))


def resized(model: FSDP) -> None:
    with model.gathered():  # as transformers' resize_token_embeddings changes a tied weight
        model.module.norm.weight.data = torch.ones(5)
    model(rows(0))


def rotary() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(Scaled())


MISTAKES: tuple[tuple[Callable[[Communicator], object], str], ...] = (
    (
        lambda comm: backward(FSDP(Layers(), comm, op="sum"), create_graph=True),
        "without create_graph",
    ),
    *(
        (partial(sparse, kind=kind), f"{kind.__name__} reduces whole ones: give its embedding")
        for kind in (DDP, ZeRO1, ZeRO2, FSDP)
    ),
    *(
        (lambda comm, ask=ask: of_one(FSDP(Layers(), comm, op="sum"), ask), "without inputs=")
        for ask in (lambda loss, of: loss.backward(inputs=of), torch.autograd.grad)
    ),
    (
        lambda comm: backward(FSDP(Aside(), comm, op="sum", unused=True)),
        r"layers.0.weight is freed between the forwards of its unit, so 'matmul' would find NaN",
    ),
    (
        lambda comm: FSDP(Layers(), comm, op="sum")(rows(0), 0, 2).sum().backward(),
        r"no gradient came for layers.1.weight",
    ),
    (
        lambda comm: FSDP(Text(), comm, op="sum")(rows(0)),
        "the model returns a str in which no tensors can be seen",
    ),
    (lambda comm: twice(comm, Layers(), FSDP), "layers.0.weight has no memory of its own"),
    (lambda comm: twice(comm, Layers(), DDP), "belongs to another DDP already"),
    (
        lambda comm: DDP(FSDP(Layers(), comm, op="sum").module, comm, op="sum"),
        "layers.0.weight has no memory of its own",
    ),
    (
        lambda comm: FSDP(FSDP(Layers(), comm, op="sum"), comm, op="sum"),
        "module.layers.0.weight has no memory of its own",
    ),
    (old_optimizer, "this AdamW was built over parameters that FSDP shards"),
    (
        lambda comm: new_optimizer(FSDP(Layers(), comm, op="sum")),
        "this SGD was built over parameters that FSDP shards",
    ),
    (
        lambda comm: new_optimizer(ZeRO1(Layers(), comm, op="sum")),
        "this SGD was built over parameters that ZeRO1 shards",
    ),
    (lambda comm: FSDP(Layers(), comm, op="sum").state_dict(), "use its full_state_dict"),
    (lambda comm: writing(FSDP(Layers(), comm, op="sum")), "use its load"),
    (
        lambda comm: FSDP(Layers(), comm, op="sum").module(rows(0)),
        "were shared out by a strategy that is gone",
    ),
    (
        lambda comm: FSDP(Layers(), comm, op="sum").module.state_dict(),
        "were shared out by a strategy that is gone",
    ),
    (
        lambda comm: FSDP(Layers(), comm, op="sum").module.load_state_dict({}),
        "were shared out by a strategy that is gone",
    ),
    (
        lambda comm: FSDP(Layers(), comm, op="sum").to(torch.bfloat16),
        "cannot be moved or converted",
    ),
    (
        lambda comm: compiled(FSDP(Layers(), comm, op="sum")),
        r"torch.compile would compile the hooks of FSDP, too, .* call compile_blocks",
    ),
    (
        lambda comm: resized(FSDP(Layers(), comm, op="sum")),
        "norm.weight was added, replaced, resized",
    ),
    (
        lambda comm: FSDP(rotary(), comm, op="sum", device="cpu"),
        r"the buffer 0.computed on meta would stay zeros",
    ),
    (
        lambda comm: FSDP(Layers(), comm, op="sum", **by_type(nn.Conv2d)),
        "the policy chooses no module",
    ),
    (
        lambda comm: FSDP(Layers(), comm, op="sum", **by_type(nn.ModuleList)),
        "layers, a ModuleList, which is never called",
    ),
    (
        lambda comm: FSDP(Pairs(), comm, op="sum", **by_type(Pair, nn.Linear)),
        r"twice, in layers.0.a and in layers.0 around it",
    ),
    (
        lambda comm: FSDP(Layers(), comm, op="sum", precision=MixedPrecision(torch.int8)),
        "cannot compute in int8: use one of",
    ),
    (lambda comm: FSDP(Layers(3 + comm.rank), comm, op="sum"), "have different models"),
)


@pytest.mark.parametrize("mistake, sentence", MISTAKES, ids=[sentence for _, sentence in MISTAKES])
@pytest.mark.filterwarnings("ignore:Using backward")
def test_mistakes_get_a_sentence(mistake: Callable[[Communicator], object], sentence: str) -> None:
    with pytest.raises((MismatchError, RuntimeError, TypeError, ValueError), match=sentence):
        minidist.run(mistake, 2, debug=True)


class Routed(nn.Module):
    """A model whose data choose its way, through layers of one size or of three."""

    def __init__(self, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, h, **DOUBLE), nn.Linear(h, 4, **DOUBLE)) for h in hidden
        )

    def forward(self, x: Tensor, way: list[int]) -> Tensor:
        for number in way:
            x = self.layers[number](x)
        return x


def each(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential)


def routes(
    comm: Communicator, hidden: tuple[int, ...], steps: int, trained: bool, at_once: bool = True
) -> None:
    """In the last step, rank 2 goes another way."""
    torch.manual_seed(0)
    model = FSDP(Routed(hidden), comm, op="sum", unused=True, policy=each)
    model.ranks.same.at_once = at_once
    with torch.set_grad_enabled(trained):
        for step in range(steps):
            loss = model(rows(0), [0, 2] if step == steps - 1 and comm.rank == 2 else [0, 1]).sum()
            if trained:
                loss.backward()
    # a GPU's stream has compared the steps by now, a thread may be behind
    model.stream.launch(comm.clock).wait()
    comm.barrier()


@pytest.mark.parametrize("trained", (True, False))
@pytest.mark.parametrize("hidden", ((5, 5, 5), (3, 5, 7)), ids=("one size", "other sizes"))
@pytest.mark.parametrize("steps", (1, 2))  # in the second, units are gathered ahead of their call
def test_ranks_that_call_different_units_are_told(
    steps: int, hidden: tuple[int, ...], trained: bool
) -> None:
    others = r"(gather layers.1|the end of forward|gather the root unit)"
    with pytest.raises(
        MismatchError,
        match=rf"\(rank 0: {others}; rank 1: {others}; rank 2: gather layers.2\): have",
    ):
        minidist.run(lambda comm: routes(comm, hidden, steps, trained), 3)


def test_steps_that_are_compared_in_the_end_as_on_a_gpu_are_told_too() -> None:
    with pytest.raises(
        MismatchError,
        match=r"\(rank 0: gather layers.1; rank 1: .*1; rank 2: gather layers.2\): have",
    ):
        minidist.run(lambda comm: routes(comm, (5, 5, 5), 1, trained=False, at_once=False), 3)


@pytest.mark.parametrize("shard_ranks", (None, 1))
def test_ranks_that_reduce_different_units_are_told(shard_ranks: int | None) -> None:
    def program(comm: Communicator) -> None:
        torch.manual_seed(0)
        model = FSDP(
            Routed((5, 5)),
            comm,
            "sum",
            True,
            each,
            reshard_after_forward=False,
            shard_ranks=shard_ranks,
        )
        with model.gathered():  # where nothing is gathered, so that only reductions can tell
            model(rows(0), [comm.rank]).sum().backward()

    with pytest.raises(
        MismatchError, match=r"rank 0: reduce the gradients of layers.0; rank 1: .* layers.1"
    ):
        minidist.run(program, 2)


def test_another_models_state_changes_nothing() -> None:
    def program(comm: Communicator) -> bool:
        model = FSDP(Layers(), comm, op="sum")
        before = model.full_state_dict()
        other = {name: value + 1 for name, value in before.items() if name != "norm.bias"} | {
            "new": torch.ones(2)
        }
        with pytest.raises(
            ValueError, match=r"new is \[2\] there and nothing here; norm.bias is missing"
        ):
            model.load(other)
        return all(
            torch.equal(value, before[name]) for name, value in model.full_state_dict().items()
        )

    assert all(minidist.run(program, 2))


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("same", self.scale)
        self.register_buffer("computed", torch.ones(2), persistent=False)


def test_a_state_without_a_buffer_is_another_models() -> None:
    def program(comm: Communicator) -> None:
        model = FSDP(nn.Sequential(Scaled()), comm, op="sum")
        whole = {name: value + 1 for name, value in model.full_state_dict().items()}
        model.load(whole)
        some = {name: value + 1 for name, value in whole.items() if "weight" in name}
        with pytest.raises(ValueError, match=r"model: 0.bias is missing; 0.scale is missing$"):
            model.load(some)
        assert all(torch.equal(it, whole[name]) for name, it in model.full_state_dict().items())

    minidist.run(program, 2)


@pytest.mark.parametrize("ranks", (1, 2))
def test_after_an_exception_in_forward_training_goes_on(ranks: int) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(x[:, :3])
        return squares(model, x)

    check(Layers, loss, ranks)


def test_after_an_exception_in_backward_one_rank_goes_on_and_several_are_told() -> None:
    def program(comm: Communicator) -> None:
        model = FSDP(Layers(), comm, op="sum")
        model.module.layers[1].register_full_backward_hook(lambda *_: 1 / 0)
        for error in (ZeroDivisionError, ZeroDivisionError if comm.size == 1 else RuntimeError):
            with pytest.raises(error):
                backward(model)
            model.zero_grad()

    minidist.run(program, 1), minidist.run(program, 2)


@pytest.mark.parametrize("precision", (None, MixedPrecision(torch.float32)))
def test_nothing_outlives_the_model(precision: MixedPrecision | None) -> None:
    def program(comm: Communicator) -> list[str]:
        model = FSDP(Layers(), comm, op="sum", precision=precision)
        optimizer = model.optimizer(torch.optim.AdamW)
        for _ in range(2):
            model(rows(0)).sum().backward()
            optimizer.step()
        kept = {"model": model} | {
            f"{name} {i}": t for i, f in enumerate(model.flats) for name, t in vars(f).items()
        }
        left = {
            name: weakref.ref(it) for name, it in kept.items() if isinstance(it, Tensor | nn.Module)
        }
        del model, optimizer, kept
        gc.collect()
        return [name for name, it in left.items() if it() is not None]

    assert minidist.run(program, 1) == [[]]
