"""What real programs do to sharded parameters: the serial numbers, or one clear sentence; never a
hang or a crash.
"""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from data_parallel import CONFIG, build, largest_difference
from ranks import mpirun, torchrun
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import minidist
from minidist.full import FSDP, MixedPrecision, register_fsdp_forward_method
from minidist.full.adapters.lora import add_lora
from minidist.full.comm import Communicator
from minidist.full.memory.offload import mapped

Loss = Callable[[nn.Module, Tensor], Tensor]
DOUBLE: dict[str, Any] = {"dtype": torch.float64}


class Layers(nn.Module):
    """Linear layers, of which each call uses those it is told to, or all; and a norm."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, **DOUBLE) for _ in range(count))
        self.norm = nn.LayerNorm(4, **DOUBLE)

    def forward(self, x: Tensor, *used: int) -> Any:
        for index in used or range(len(self.layers)):
            x = self.layers[index](x).tanh()
        return self.norm(x)


def rows(rank: int, count: int = 3) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(50 + rank), **DOUBLE)


def seeded(model: nn.Module, seed: int) -> nn.Module:
    draws = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = (
                torch.randn(parameter.shape, generator=draws, dtype=parameter.dtype) / 2
            )
    return model


def squares(model: nn.Module, x: Tensor) -> Tensor:
    total: Tensor = model(x).square().sum()
    return total


def check(
    make: Callable[[], nn.Module], loss: Loss = squares, ranks: int = 2, **options: Any
) -> None:
    """Assert that two steps of FSDP end where the serial run does."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, mine: range) -> None:
        for _ in range(2):
            optimizer.zero_grad()
            for rank in mine:
                loss(model, rows(rank)).backward()
            optimizer.step()

    def program(comm: Communicator) -> dict[str, Tensor]:
        model = FSDP(seeded(make(), comm.rank), comm, op="sum", **options)
        train(model, model.optimizer(torch.optim.AdamW, lr=0.05), range(comm.rank, comm.rank + 1))
        return model.full_state_dict()

    serial = seeded(make(), 0)
    trained = [parameter for parameter in serial.parameters() if parameter.requires_grad]
    train(serial, torch.optim.AdamW(trained, lr=0.05), range(ranks))
    expected = {
        name: value for name, value in serial.state_dict().items() if value.is_floating_point()
    }
    for state in minidist.run(program, ranks):
        found = {name: state[name] for name in expected}
        # some are float32
        assert largest_difference(found, expected) <= (1e-9 if make is not Odd else 1e-6)


# ---- shapes of models ----


class Hidden(Layers):
    def forward(self, x: Tensor) -> Any:
        """Return what each layer returned, too."""
        hidden = [x := layer(x) for layer in self.layers]
        return {"y": self.norm(x), "hidden": hidden}


class Offset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(5, 4, **DOUBLE))

    def forward(self, count: int) -> Tensor:
        """Return a view of a parameter."""
        return self.table[:count]


class Odd(nn.Module):
    """Parameters in containers that are never called, of two dtypes, frozen integers, ones of no
    elements, a view.
    """

    def __init__(self) -> None:
        super().__init__()
        self.offset, self.linear = Offset(), nn.Linear(4, 4, **DOUBLE)
        self.listed = nn.ParameterList(
            [nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4, **DOUBLE))]
        )
        self.named = nn.ModuleDict({"a": nn.Linear(4, 4, **DOUBLE)})
        self.codes = nn.Parameter(torch.arange(4, dtype=torch.int32), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        x = self.linear(x + self.offset(len(x))) @ self.listed[0].double() + self.listed[1]
        return self.named["a"](x) * self.offset(len(x)) * self.codes


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, **DOUBLE), nn.Linear(4, 4, bias=False, **DOUBLE)

    def forward(self, x: Tensor, *, beside: dict[str, Tensor]) -> Any:
        return {"x": self.a(x).sin(), "rest": (self.b(beside["it"]), x)}


class Pairs(nn.Module):
    """Units with several inputs and outputs, by keyword and in dictionaries; the ends share a
    matrix.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(3))
        self.layers[2].b.weight = self.layers[0].b.weight  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        beside = x
        for layer in self.layers:
            out = layer(x, beside={"it": beside})
            x, (beside, before) = out["x"] + out["rest"][1], out["rest"]
        return x + beside + before


def image() -> nn.Module:
    layers = (
        nn.Conv2d(1, 3, 2),
        nn.BatchNorm2d(3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(3, 2),
    )
    model: nn.Module = nn.Sequential(*layers).double().to(memory_format=torch.channels_last)
    return model.eval()


def on_images(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model, x.view(-1, 1, 2, 2))


def all_hidden(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    total: Tensor = out["y"].square().sum() + sum(hidden.sin().sum() for hidden in out["hidden"])
    return total


def normalised() -> nn.Module:
    """Units whose own hooks compute the weight, before forward."""
    layers = (nn.Linear(4, 4, **DOUBLE), nn.Tanh(), nn.Linear(4, 4, **DOUBLE))
    with warnings.catch_warnings():
        # that of torch.nn.utils.parametrizations is not a hook
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(
            *(nn.utils.weight_norm(x) if isinstance(x, nn.Linear) else x for x in layers)
        )


def sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3, **DOUBLE), nn.Tanh(), nn.Linear(3, 2, **DOUBLE))


@pytest.mark.parametrize("ranks", (1, 2, 5))
@pytest.mark.parametrize(
    "make, loss",
    (
        *(
            (lambda: nn.Linear(4, 1, **DOUBLE), squares),
            (sequence, squares),
            (Pairs, squares),
            (Odd, squares),
        ),
        *((image, on_images), (lambda: Hidden(5), all_hidden), (normalised, squares)),
        (Layers, lambda model, x: squares(model, x[: int(x[0, 0] > 0)])),  # some ranks have no rows
    ),
    ids=(
        "linear",
        "sequential",
        "inputs and outputs",
        "odd",
        "convolution",
        "hidden states",
        "weight_norm",
        "empty",
    ),
)
@pytest.mark.parametrize("reshard", (True, False))
def test_parity_of_models(
    make: Callable[[], nn.Module], loss: Loss, ranks: int, reshard: bool
) -> None:
    check(make, loss, ranks, reshard_after_forward=reshard)


def test_adapters_in_a_frozen_model() -> None:
    def make() -> nn.Module:
        model = build(CONFIG, 0)
        add_lora(model, rank=2)
        return model

    tokens = torch.arange(8).view(1, 8)
    check(make, lambda model, x: model(tokens + int(x[0, 0] > 0)).square().sum(), 3)


# ---- orders of calls ----


class Recomputed(Layers):
    def forward(self, x: Tensor, *used: int) -> Any:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True).tanh()
        return self.norm(x)


def two_backwards(model: nn.Module, x: Tensor) -> Tensor:
    first, second = model(x, 0, 1), model(x, 0, 2)
    first.square().sum().backward()
    return second.sin().sum()  # type: ignore[no-any-return]


def evaluated(mode: Callable[[], Any]) -> Loss:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with mode():
            model(x, 0)
        y = model(x)
        with mode():
            model(x, 0)
        return y.square().sum()  # type: ignore[no-any-return]

    return loss


def other_gradients(model: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad_()
    (inner,) = torch.autograd.grad(squares(model, x), x)
    return squares(model, x + inner)


CALLS: dict[str, Loss] = {
    "a unit several times": lambda model, x: squares(lambda x: model(x, 0, 1, 0, 2, 0, 0), x),  # type: ignore[arg-type]
    "two forwards, one backward": lambda model, x: (
        model(x, 0, 1).sin().sum() + model(x, 0, 2).square().sum()
    ),
    "forward of forward": lambda model, x: model(model(x, 0, 1), 2, 0).square().sum(),
    "two forwards, two backwards": two_backwards,
    "no_grad": evaluated(torch.no_grad),
    "inference_mode": evaluated(torch.inference_mode),
    "autograd.grad": other_gradients,
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False).square().sum(),
    "reentrant checkpoint": lambda model, x: (
        checkpoint(model, x.requires_grad_(), use_reentrant=True).square().sum()
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("reshard", (True, False))
def test_parity_of_calls(name: str, reshard: bool) -> None:
    check(lambda: Layers(4), CALLS[name], unused=True, reshard_after_forward=reshard)


def test_parity_of_units_in_reentrant_checkpoints() -> None:
    check(Recomputed)


class Box:
    def __init__(self, held: Tensor) -> None:
        self.held = held


class Ways(Layers):
    """A frozen layer whose output reaches the loss by another way than as what it returns."""

    def __init__(self, way: str, frozen: bool) -> None:
        super().__init__()
        self.layers[1] = Way(way)
        self.layers[1].requires_grad_(not frozen)

    def forward(self, x: Tensor, *used: int) -> Any:
        for layer in self.layers:
            x = layer(x)
            x = layer.way_out(x) if isinstance(layer, Way) else x.tanh()
        return self.norm(x)


class Way(nn.Linear):
    def __init__(self, way: str) -> None:
        super().__init__(4, 4, **DOUBLE)
        self.way = way

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x).tanh() * self.bias
        if self.way == "a view":
            return y[None].squeeze(0)
        if self.way == "an attribute":
            self.kept = y
        if self.way == "a closure":
            self.ask = lambda: y
        return x * 1, Box(y) if self.way == "an object" else None

    def way_out(self, seen: Any) -> Any:
        if self.way == "a view":
            seen += 1
            return seen
        if self.way == "an object":
            return seen[1].held
        return self.kept if self.way == "an attribute" else self.ask()


@pytest.mark.parametrize("frozen", (True, False))
@pytest.mark.parametrize("way", ("a view", "an object", "an attribute"))
def test_a_unit_is_whole_by_whatever_way_its_output_reaches_the_loss(
    way: str, frozen: bool
) -> None:
    check(lambda: Ways(way, frozen))


def test_what_was_saved_of_a_unit_is_not_read_before_it_is_gathered() -> None:
    """Not even if it is being gathered: autograd compares versions before it reads."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        check(lambda: Ways("a closure", frozen=True))


def test_a_backward_through_a_forward_from_before_a_step_is_refused_as_by_torch() -> None:
    def program(comm: Communicator) -> None:
        model = FSDP(Layers(), comm, op="sum")
        loss = squares(model, rows(0))
        loss.backward(retain_graph=True)
        model.optimizer(torch.optim.SGD, lr=0.1).step()
        loss.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        minidist.run(program, 2)


@pytest.mark.parametrize("unused", (False, True))
def test_synchronize_reduces_what_no_sync_has_added_up(unused: bool) -> None:
    def program(comm: Communicator) -> None:
        serial = seeded(Layers(), 0)
        model = FSDP(seeded(Layers(), 0), comm, op="sum", unused=unused)
        with model.no_sync():
            squares(model, rows(comm.rank)).backward()
        model.synchronize(), model.synchronize()
        for rank in range(comm.size):
            squares(serial, rows(rank)).backward()
        for name, gradient in model.full_gradients():
            torch.testing.assert_close(gradient, serial.get_parameter(name).grad)

    minidist.run(program, 2)


def test_memory_that_numpy_has_seen_is_left_to_it() -> None:
    def program(comm: Communicator) -> None:
        model = FSDP(seeded(Layers(), 0), comm, op="sum")
        loss = squares(model, rows(0))
        with model.gathered():
            arrays = [parameter.detach().numpy() for parameter in model.module.parameters()]
        loss.backward()
        model.optimizer(torch.optim.SGD, lr=0.1).step()
        model(rows(0))
        for array, whole in zip(arrays, seeded(Layers(), 0).parameters(), strict=True):
            assert torch.equal(torch.from_numpy(array), whole)

    minidist.run(program, 2)


# ---- precision, memory, wires ----


def test_computing_in_bfloat16_is_what_one_would_write_by_hand() -> None:
    def program(comm: Communicator) -> tuple[dict[str, Tensor], set[Any]]:
        precision = MixedPrecision(torch.bfloat16, torch.float32, torch.float32)
        model, seen = seeded(sequence().float(), 0), set()
        for layer in model.children():
            layer.register_forward_hook(
                lambda m, x, y: seen.update([x[0].dtype, *(p.dtype for p in m.parameters())])
            )
        wrapped = FSDP(model, comm, op="sum", precision=precision)
        optimizer = wrapped.optimizer(torch.optim.SGD, lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            y = wrapped(rows(comm.rank + step).float())
            y.square().sum().backward()
            optimizer.step()
        seen |= {("out", y.dtype)} | {
            ("master", flat.shard.values.dtype, flat.shard.values.grad_fn) for flat in wrapped.flats
        }
        assert all(flat.mine is flat.shard.values for flat in wrapped.flats), (
            "a second copy of the shards is kept"
        )
        return wrapped.full_state_dict(), seen

    masters, ranks = seeded(sequence().float(), 0), 2
    for step in range(3):
        for parameter in masters.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for rank in range(ranks):
            low = copy.deepcopy(masters).bfloat16()
            low(rows(rank + step).bfloat16()).float().square().sum().backward()
            for master, parameter in zip(masters.parameters(), low.parameters(), strict=True):
                master.grad += parameter.grad.float()
        torch.optim.SGD(masters.parameters(), lr=0.05).step()
    for state, seen in minidist.run(program, ranks):
        assert seen == {torch.bfloat16, ("out", torch.float32), ("master", torch.float32, None)}
        assert all(torch.equal(state[name], value) for name, value in masters.state_dict().items())


def test_parameters_streamed_from_files(tmp_path: Path) -> None:
    check(Layers, ranks=3, allocate=lambda count, dtype: mapped((count,), dtype, tmp_path))


PARITY = """
    import minidist
    from data_parallel import CONFIG, DROPPING, Case, check_parity, parallel
    from minidist.full import FSDP

    comm = minidist.init(limit=60)
    for config, options in ((CONFIG, {}), (DROPPING, {"reshard_after_forward": False}), (CONFIG, {"shard_ranks": 1})):
        check_parity([parallel(comm, Case(FSDP, config, microbatches=2), **options)], config)
    print("parity")
"""


@pytest.mark.parametrize(
    "start, ranks",
    (
        (mpirun, 3),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in ((mpirun, 2), (torchrun, 2))),
    ),
)
def test_parity_between_processes(start: Any, ranks: int) -> None:
    job = start(ranks, PARITY, timeout=100)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("parity") == ranks


# ---------------------------------------------------------------- methods that are not `forward`


class Coder(nn.Module):
    """A unit with a method beside its forward, which calls a layer, and another that reads a
    parameter itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, **DOUBLE) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x) + self.second(x)

    def encode(self, x: Tensor) -> Tensor:
        return self.first(x).tanh()

    def twice(self, x: Tensor) -> Tensor:
        """Call the forward in its midst, and use a parameter after it."""
        return self(x) @ self.second.weight


class Coders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coder() for _ in range(3))
        self.head = nn.Linear(4, 4, **DOUBLE)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer.encode(x) + layer(x)
        return self.head(x)

    def again(self, x: Tensor) -> Tensor:
        """Call the model in its midst, as what generates does, and the head after it."""
        return self.head(self(self(x)))


def registered(comm: Communicator, model: nn.Module) -> FSDP:
    """Return the model wrapped, with all its methods registered."""
    wrapped = FSDP(model, comm, "sum")
    for layer in wrapped.module.layers:
        register_fsdp_forward_method(layer, "encode")
        register_fsdp_forward_method(layer, "twice")
    register_fsdp_forward_method(wrapped.module, "again")
    return wrapped


def test_methods_of_units_train_and_evaluate_as_in_a_serial_run() -> None:
    def program(comm: Communicator) -> None:
        serial, model = seeded(Coders(), 0), registered(comm, seeded(Coders(), 0))
        x, layers = rows(0), model.module.layers
        for training in (False, True):
            with torch.set_grad_enabled(training):
                for name, found, wanted in (
                    ("a method", layers[1].encode(x), serial.layers[1].encode(x)),
                    ("a method that calls forward", layers[2].twice(x), serial.layers[2].twice(x)),
                    ("the model's own", model.module.again(x), serial.again(x)),
                    ("methods in the model's forward", model(x), serial(x)),
                ):
                    torch.testing.assert_close(
                        found, wanted, msg=lambda text, name=name: f"{name}: {text}"
                    )
        (model(x).square().sum() / comm.size).backward()
        serial(x).square().sum().backward()
        for name, gradient in model.full_gradients():
            wanted_gradient = serial.get_parameter(name).grad
            if wanted_gradient is not None:
                torch.testing.assert_close(
                    gradient, wanted_gradient, msg=lambda text, name=name: f"{name}: {text}"
                )
        alone = model.unwrap()
        assert not {"encode", "twice", "again"} & {
            name for part in alone.modules() for name in vars(part)
        }
        torch.testing.assert_close(alone.again(x), serial.again(x))

    minidist.run(program, 2)


def test_a_method_that_nobody_registered_says_so_in_place_of_nan() -> None:
    """In evaluation, where no gradient could tell."""

    def program(comm: Communicator) -> None:
        wrapped = FSDP(seeded(Coders(), 0), comm, "sum")
        module, x = wrapped.module, rows(0)
        said = r"layers.0.first.weight is freed .* so 'linear' would find NaN.* by register_fsdp_forward_method"
        with torch.no_grad():
            with pytest.raises(RuntimeError, match=said):
                module.layers[0].encode(x)
            with pytest.raises(
                RuntimeError, match=r"head.weight is freed .* so 'linear' would find NaN"
            ):
                module.head(x)
            with wrapped.gathered():
                assert bool(module.layers[0].encode(x).isfinite().all())
        with pytest.raises(
            ValueError,
            match="this Linear is no unit of an FSDP model, so nothing knows when forward",
        ):
            register_fsdp_forward_method(module.layers[0].first, "forward")
        with pytest.raises(ValueError, match="a Coder has no method 'decode'"):
            register_fsdp_forward_method(module.layers[0], "decode")
        wrapped.unwrap()
        module.layers[0].encode(x)

    minidist.run(program, 2)


def reads() -> list[Callable[[nn.Parameter], object]]:
    """Return lines that read a parameter's values, or write them."""
    return [
        *(
            lambda p: p.sum(),
            lambda p: p.data,
            lambda p: p.detach(),
            lambda p: torch.stack([p, p]),
            lambda p: p[0],
        ),
        *(
            lambda p: 1 + p,
            lambda p: p.tolist(),
            lambda p: p.to(torch.float16),
            lambda p: p.T,
            lambda p: p.mul_(2),
        ),
        *(nn.init.zeros_, copy.deepcopy, pickle.dumps, lambda p: p.data.copy_(torch.ones(p.shape))),
    ]


@pytest.mark.parametrize("frozen", (False, True))
def test_a_freed_parameter_says_so_to_whoever_reads_it_or_writes_into_it(frozen: bool) -> None:
    def program(comm: Communicator) -> None:
        layers = OrderedDict(first=nn.Linear(4, 4, **DOUBLE), head=nn.Linear(4, 3, **DOUBLE))
        model: Any = seeded(nn.Sequential(layers), 0)
        model.head.weight.requires_grad_(not frozen)
        whole = model.head.weight.sum().item()
        wrapped, weight = FSDP(model, comm, "sum", unused=True), model.head.weight
        wrapped(rows(0)).sum().backward()
        for read in reads():
            with pytest.raises(
                RuntimeError, match=r"head\.weight is freed between the forwards of its unit, so"
            ):
                read(weight)
        assert weight.shape == wrapped.slice_of(weight).placement.slice.shape  # type: ignore[attr-defined]
        assert (weight.grad is None) == frozen
        assert (
            repr(weight)
            == f"head.weight: a freed parameter of shape {list(weight.shape)}, torch.float64"
        )
        with wrapped.gathered():
            assert weight.sum().item() == pytest.approx(whole)
        kept = weakref.ref(wrapped)
        del wrapped
        gc.collect()
        assert kept() is None
        with pytest.raises(RuntimeError, match="is freed"):  # nobody is left who could gather it
            weight.sum()

    minidist.run(program, 2)


def test_a_registered_method_keeps_no_strategy_alive() -> None:
    model = seeded(Coders(), 0)
    program: Any = lambda comm: weakref.ref(registered(comm, model))  # noqa: E731
    [reference] = minidist.run(program, 1)
    gc.collect()
    assert reference() is None
