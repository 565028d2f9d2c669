"""Mixed precision: each thing that fails in 16 bits, shown failing; its cure; and that all ranks do
the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist
from minidist.full import DDP, ZeRO1
from minidist.full.clip import clip_by_global_norm
from minidist.full.comm import Cluster, Communicator
from minidist.full.model import GPT, GPTConfig, cross_entropy_sum
from minidist.full.precision.masters import MasterWeights
from minidist.full.precision.mixed import LossScaler, check_dtype
from minidist.full.precision.rounding import stochastic_round

CONFIG = GPTConfig(vocabulary=32, layers=2, hidden=32, heads=4, sequence=16, tied=True)
BFLOAT16_MAX = torch.finfo(torch.bfloat16).max


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gpt(dtype: torch.dtype, seed: int = 0) -> GPT:
    return GPT(CONFIG, seeded(seed), dtype=dtype)


def tokens(step: int) -> Tensor:
    return torch.randint(32, (4, 13), generator=seeded(100 + step))


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Loss per token."""
    batch = tokens(step)
    return cross_entropy_sum(model(batch[:, :-1]), batch[:, 1:]) / 48


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# ---- stochastic rounding ----


@pytest.mark.parametrize("value", (1.001, -1.001, 3e-40, -7.7e-12, 2.9e38, 1 + 1 / 128))
def test_stochastic_rounding_is_right_on_average_and_goes_to_a_neighbour(value: float) -> None:
    x = torch.full((100_000,), value)
    rounded = stochastic_round(x, seeded())
    exact = x[0].double()
    levels = rounded.unique().double()
    assert len(levels) == (1 if exact == 1 + 1 / 128 else 2)
    gap = float(levels[-1] - levels[0])
    assert levels[0] <= exact <= levels[-1]
    # four deviations of the mean
    assert abs(rounded.double().mean() - exact) <= 4 * gap * 0.5 / math.sqrt(len(x))
    nearest = float(exact.float().bfloat16())
    assert nearest in levels
    spacing = abs(nearest) * 2.0**-7  # neighbours are that far apart at most; subnormals 2^-133
    assert gap <= max(spacing, 2.0**-133)


def test_stochastic_rounding_keeps_what_is_not_a_number_and_makes_nothing_infinite() -> None:
    quiet_and_low_bits = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(
        torch.float32
    )
    assert stochastic_round(quiet_and_low_bits, seeded()).isnan().all()
    infinite = torch.tensor([math.inf, -math.inf])
    assert torch.equal(stochastic_round(infinite, seeded()).float(), infinite)
    largest = torch.finfo(torch.float32).max
    top = torch.tensor([largest, -largest, BFLOAT16_MAX, -BFLOAT16_MAX]).repeat(1000)
    assert torch.equal(
        stochastic_round(top, seeded()).float().abs(), torch.full((4000,), BFLOAT16_MAX)
    )
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-133]).repeat(100)  # bfloat16 holds these
    rounded = stochastic_round(values, seeded()).float()
    assert torch.equal(rounded, values) and torch.equal(rounded.signbit(), values.signbit())


def test_stochastic_rounding_follows_its_generator_and_refuses_other_dtypes() -> None:
    x = torch.randn(7, 5, generator=seeded()).t()  # not contiguous
    assert torch.equal(stochastic_round(x, seeded(1)), stochastic_round(x, seeded(1)))
    assert not torch.equal(stochastic_round(x, seeded(1)), stochastic_round(x, seeded(2)))
    assert stochastic_round(torch.empty(0), seeded()).shape == (0,)
    with pytest.raises(TypeError, match="float64"):
        stochastic_round(x.double(), seeded())


def test_a_bfloat16_weight_stands_still_to_the_nearest_and_moves_at_the_right_speed_at_random() -> (
    None
):
    nearest, random, draws = torch.ones(2000).bfloat16(), torch.ones(2000).bfloat16(), seeded()
    for _ in range(300):
        nearest -= 0.001  # half the distance to the neighbour below is 1/512
        random = stochastic_round(random.float() - 0.001, draws)
    assert torch.equal(nearest, torch.ones(2000).bfloat16())
    assert float(random.float().mean()) == pytest.approx(0.7, abs=0.003)


# ---- master weights ----


def test_small_updates_vanish_in_bfloat16_and_add_up_in_masters() -> None:
    ends = []
    for optimizer in (torch.optim.SGD, MasterWeights):
        weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        options = {"optimizer": torch.optim.SGD} if optimizer is MasterWeights else {}
        stepper = optimizer([weight], lr=1e-3, **options)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            stepper.step()
        ends.append(float(weight[0].detach()))
    assert ends == [1.0, float(torch.tensor(0.9).bfloat16())]


@pytest.mark.parametrize("kind", (torch.optim.AdamW, torch.optim.SGD))
def test_masters_follow_a_float32_optimizer_that_gets_the_same_gradients(
    kind: Callable[..., Any],
) -> None:
    narrow, draws = gpt(torch.bfloat16), seeded(7)
    wide = gpt(torch.float32)
    wide.load_state_dict({name: weight.float() for name, weight in narrow.state_dict().items()})
    for model in (narrow, wide):
        model.layers[0].mlp.up.weight.requires_grad_(False)
    ours = MasterWeights(narrow.parameters(), kind, lr=0.01, weight_decay=0.1)
    plain = kind(wide.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(5):
        for (name, low), high in zip(narrow.named_parameters(), wide.parameters(), strict=True):
            skipped = not low.requires_grad or (step == 2 and "norm" in name)
            low.grad = None if skipped else torch.randn(low.shape, generator=draws).bfloat16()
            high.grad = None if low.grad is None else low.grad.float()
        for optimizer in (ours, plain):
            optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
            optimizer.step()
    frozen = narrow.layers[0].mlp.up.weight
    assert frozen not in ours.state and narrow.head.weight is narrow.embedding.weight
    assert len(ours.state) == len(list(narrow.parameters())) - 1
    for low, high in zip(narrow.parameters(), wide.parameters(), strict=True):
        master = low if low is frozen else ours.state[low]["master"]
        assert torch.equal(master.float(), high) and torch.equal(low, high.bfloat16())


def test_masters_serve_torch_schedulers_groups_hooks_and_closures() -> None:
    weights = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(3)]
    wide = nn.Parameter(torch.ones(2))  # its own master
    optimizer = MasterWeights(
        [{"params": weights[:2]}, {"params": [wide], "lr": 0.5}], torch.optim.SGD, lr=1.0
    )
    optimizer.add_param_group({"params": [weights[2]], "lr": 0.25})
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()  # nothing has a gradient yet
    schedule.step()
    hooked: list[str] = []
    optimizer.register_step_post_hook(lambda *_: hooked.append("stepped"))

    def closure() -> float:
        optimizer.zero_grad()
        loss = sum((weight.float().sum() for weight in weights[1:]), wide.sum())
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 6.0 and hooked == ["stepped"]
    assert [float(weight[0].detach()) for weight in (*weights, wide)] == [1.0, 0.5, 0.875, 0.75]
    assert set(optimizer.state) == set(weights[1:])
    assert optimizer.param_groups[0]["params"] == weights[:2]
    optimizer.zero_grad()
    assert all(weight.grad is None for weight in (*weights, wide))


def test_masters_are_read_at_the_first_step_so_that_a_strategy_may_change_the_model_before() -> (
    None
):
    def program(comm: Communicator) -> list[Tensor]:
        model = gpt(torch.bfloat16, seed=comm.rank)
        optimizer = MasterWeights(model.parameters(), lr=0.01)
        train(DDP(model, comm, op="sum"), optimizer, range(3))
        return [weight.detach() for weight in model.parameters()]

    first, second = minidist.run(program, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
def test_a_factor_is_applied_once_the_gradients_are_wide(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = MasterWeights([weight], torch.optim.SGD, lr=1.0)
    weight.grad = torch.full_like(weight, 2.0**15)
    optimizer.step(factor=2.0**-40)  # 0 in float16
    weight.grad = torch.full_like(weight, 2.0**15)
    optimizer.step(factor=-(2.0**-16))
    master = optimizer.state[weight]["master"] if dtype == torch.float16 else weight.detach()
    assert torch.equal(master, torch.full((3,), 1.5 - 2.0**-25).float())
    assert (weight.grad == (2.0**15 if dtype == torch.float16 else -0.5)).all()


def test_who_overwrites_a_parameter_overwrites_its_master() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = MasterWeights([weight], torch.optim.SGD, lr=2.0**-13)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    with torch.no_grad():
        weight.copy_(weight.clone())  # the same value, as gathering ZeRO's shards writes it
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["master"], torch.full((3,), 1 - 2.0**-11))
    with torch.no_grad():
        weight.fill_(2.0)
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["master"], torch.full((3,), 2 - 2.0**-13))


def test_masters_continue_as_wide_parameters_and_are_not_kept_twice() -> None:
    narrow, wide = nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), nn.Parameter(torch.ones(3))
    first, second = MasterWeights([narrow], lr=0.1), MasterWeights([wide], lr=0.1)
    narrow.grad = torch.ones_like(narrow)
    first.step()
    second.load_state_dict(first.state_dict())
    assert second.state[wide].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_state_of_shards_is_that_of_an_unsharded_optimizer() -> None:
    """The hooks by which ZeRO gathers and cuts the state see masters, too, and in float32."""

    def program(comm: Communicator, given: Any = None) -> tuple[Any, list[Tensor]]:
        model = gpt(torch.bfloat16, seed=3)
        sharded = ZeRO1(model, comm, op="sum")
        optimizer = sharded.optimizer(MasterWeights, lr=0.01)
        if given:
            optimizer.load_state_dict(given)
        train(sharded, optimizer, range(2))
        return optimizer.state_dict(), [weight.detach() for weight in model.parameters()]

    first = minidist.run(program, 3)[0][0]
    for index, weight in enumerate(gpt(torch.bfloat16).parameters()):
        held = first["state"][index]
        assert (
            held["master"].shape == held["exp_avg"].shape == weight.shape
            and held["master"].dtype == torch.float32
        )
    weights = [run[1] for run in minidist.run(lambda comm: program(comm, first), 2)]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    alone = MasterWeights(gpt(torch.bfloat16).parameters(), lr=0.5)
    alone.load_state_dict(first)
    assert float(alone.state_dict()["state"][0]["step"]) == 2


def test_a_run_continues_bit_for_bit_from_its_state() -> None:
    def build(seed: int) -> tuple[GPT, MasterWeights]:
        model = gpt(torch.bfloat16, seed)
        return model, MasterWeights(model.parameters(), lr=0.01)

    model, optimizer = build(3)
    train(model, optimizer, range(3))
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    saved = optimizer.state_dict()
    state = saved | {
        "state": {i: {k: v.clone() for k, v in held.items()} for i, held in saved["state"].items()}
    }
    other, another = build(4)
    other.load_state_dict(weights)
    another.load_state_dict(state)
    assert train(model, optimizer, range(3, 6)) == train(other, another, range(3, 6))
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert optimizer.state_dict()["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq", "master"}
    assert all(
        moment.dtype == torch.float32 for moment in another.state_dict()["state"][0].values()
    )


def test_masters_continue_from_the_state_of_the_optimizer_alone() -> None:
    model, wide = gpt(torch.bfloat16), gpt(torch.float32)
    plain = torch.optim.AdamW(wide.parameters(), lr=0.01)
    train(wide, plain, range(2))
    optimizer = MasterWeights(model.parameters(), lr=0.5)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.01
    train(model, optimizer, range(2, 3))
    assert float(optimizer.state_dict()["state"][0]["step"]) == 3


def test_training_a_gpt_with_masters_stays_near_float32_and_nearer_than_without() -> None:
    exact, steps = gpt(torch.float32), range(60)
    reference = train(exact, torch.optim.AdamW(exact.parameters(), lr=1e-4), steps)

    def distance(model: GPT) -> float:
        pairs = zip(model.parameters(), exact.parameters(), strict=True)
        return math.sqrt(sum(float((a.detach() - b.detach()).square().sum()) for a, b in pairs))

    def optimizers(model: GPT) -> dict[str, torch.optim.Optimizer]:
        return {
            "none": torch.optim.AdamW(model.parameters(), lr=1e-4),
            "masters": MasterWeights(model.parameters(), lr=1e-4),
        }

    distances, losses = {}, {}
    for name in ("none", "masters"):
        model = gpt(torch.bfloat16)
        losses[name] = train(model, optimizers(model)[name], steps)
        distances[name] = distance(model)
    assert losses["masters"][-1] == pytest.approx(reference[-1], rel=0.01)
    assert distances["masters"] < distances["none"] / 2


# ---- loss scaling ----


def float16_update(scaler: LossScaler | None) -> Tensor:
    """Return what a step of 1 times the gradient of a mean over many tokens, computed in float16,
    takes away.
    """
    weight = nn.Parameter(torch.ones(8, dtype=torch.float16))
    loss = (weight * weight).float().sum() * 1e-8  # float16's smallest number is 6e-8
    (loss if scaler is None else scaler.scale_loss(loss)).backward()
    optimizer = MasterWeights([weight], torch.optim.SGD, lr=1e6)  # which shows beside a weight of 1
    assert scaler is None or not scaler.overflowed(clip_by_global_norm([weight], 0))
    optimizer.step(factor=1.0 if scaler is None else 1 / scaler.scale)
    return (1 - optimizer.state[weight]["master"]) / 1e6


def test_small_float16_gradients_are_zero_without_a_loss_scale_and_right_with_one() -> None:
    assert torch.equal(float16_update(None), torch.zeros(8))
    assert float16_update(LossScaler()) == pytest.approx(torch.full((8,), 2e-8), rel=2.0**-10)


def test_the_scale_backs_off_and_grows_again() -> None:
    scaler = LossScaler(scale=1024.0, interval=3)
    scales = []
    for overflow in (True, False, False, True, False, False, False, False):
        scaler.update(overflow)
        scales.append(scaler.scale)
    assert scales == [512, 512, 512, 256, 256, 256, 512, 512]
    copy = LossScaler(interval=3)
    copy.load_state_dict(scaler.state_dict())
    for _ in range(2):
        copy.update(False)
        scaler.update(False)
    assert copy.state_dict() == scaler.state_dict() == {"scale": 1024.0, "good_steps": 0}
    static = LossScaler(scale=128.0, growth=1.0, backoff=1.0, interval=1)
    for overflow in (True, False, False):
        static.update(overflow)
    assert static.scale == 128.0


def test_an_overflow_at_the_smallest_scale_is_an_error_in_words() -> None:
    scaler = LossScaler(scale=3.0, smallest=1.0)
    scaler.update(True)
    scaler.update(True)
    assert scaler.scale == 1.0
    with pytest.raises(FloatingPointError, match=r"even at loss scale 1: lower the learning rate"):
        scaler.update(True)


@pytest.mark.parametrize(
    "options",
    ({"scale": 0.5}, {"growth": 0.5}, {"backoff": 2.0}, {"interval": 0}, {"scale": math.nan}),
)
def test_a_scaler_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs scale >= smallest"):
        LossScaler(**options)


@pytest.mark.parametrize("bad", (math.inf, -math.inf, math.nan))
def test_one_bad_element_among_the_largest_is_found_by_the_norm(bad: float) -> None:
    weight = nn.Parameter(torch.empty(1000, dtype=torch.float16))
    weight.grad = torch.full_like(weight, 65504.0)
    assert not LossScaler().overflowed(clip_by_global_norm([weight], 0))
    weight.grad[3] = bad
    assert LossScaler().overflowed(clip_by_global_norm([weight], 0))


@pytest.mark.parametrize("ranks", (2, 3))
def test_an_overflow_on_one_rank_makes_all_ranks_skip(ranks: int) -> None:
    """Step 1 overflows on the last rank alone, after the gradients were made equal."""

    def program(comm: Communicator) -> tuple[list[Tensor], list[float], list[bool], list[bool]]:
        model = gpt(torch.float16, seed=5)
        optimizer, scaler = (
            MasterWeights(model.parameters(), lr=0.01),
            LossScaler(comm, scale=2.0**10),
        )
        scales, overflows, moved = [], [], []
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale_loss(loss_of(model, step)).backward()
            before = [weight.detach().clone() for weight in model.parameters()]
            gradient = model.norm.weight.grad
            assert gradient is not None
            if step == 1 and comm.rank == ranks - 1:
                gradient[0] = math.inf
            sent = comm.traffic.messages
            overflow = scaler.overflowed(clip_by_global_norm(model.parameters(), 0))
            assert comm.traffic.messages - sent <= 2 * (ranks - 1)  # those of one all-reduce
            if not overflow:
                optimizer.step(factor=1 / scaler.scale)
            scaler.update(overflow)
            overflows.append(overflow)
            moved.append(
                any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            )
            scales.append(scaler.scale)
        return [weight.detach() for weight in model.parameters()], scales, overflows, moved

    results = minidist.run(program, ranks)
    for weights, scales, overflows, moved in results:
        assert overflows == [False, True, False] and moved == [True, False, True]
        assert scales == [1024, 512, 512]
        assert all(torch.equal(a, b) for a, b in zip(weights, results[0][0], strict=True))


@pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning"
)
def test_float16_data_parallel_training_finds_its_scale_and_keeps_ranks_equal() -> None:
    """From a scale that overflows, down to one that does not."""

    def program(comm: Communicator) -> tuple[list[Tensor], float, list[float]]:
        model = gpt(torch.float16, seed=comm.rank)
        wrapped = DDP(model, comm, op="sum")
        optimizer, scaler, losses = (
            MasterWeights(model.parameters(), lr=0.01),
            LossScaler(comm, scale=2.0**24),
            [],
        )
        for _ in range(20):
            optimizer.zero_grad()
            batch = tokens(0)[2 * comm.rank : 2 * comm.rank + 2]
            loss = cross_entropy_sum(wrapped(batch[:, :-1]), batch[:, 1:]) / 48
            scaler.scale_loss(loss).backward()
            wrapped.synchronize()
            norm = clip_by_global_norm(model.parameters(), 0)
            overflow = scaler.overflowed(norm)
            if not overflow:
                optimizer.step(factor=min(1.0, float(scaler.scale / norm)) / scaler.scale)
            scaler.update(overflow)
            losses.append(loss.item())
        return [weight.detach() for weight in model.parameters()], scaler.scale, losses

    (first, scale, losses), (second, other, _) = minidist.run(program, 2)
    assert scale == other < 2.0**24
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert losses[-1] < losses[0] - 0.2


def test_without_values_nothing_overflows() -> None:
    def program(comm: Communicator) -> bool:
        scaler = LossScaler(comm)
        return scaler.overflowed(torch.ones((), device="meta"))

    assert minidist.run(program, 4, cluster=Cluster.h100(nodes=1)) == [False] * 4


# ---- devices ----


def test_a_device_that_cannot_compute_in_a_dtype_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float64):
        check_dtype(dtype, cpu)
    with pytest.raises(
        ValueError, match=r"cannot compute in int8: use one of float8_e4m3fn, .*float64"
    ):
        check_dtype(torch.int8, cpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Some GPU")
    for capability, refused in (((7, 0), 3), ((8, 0), 2), ((8, 9), 0), ((9, 0), 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, it=capability: it)
        names = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32")
        for name in names[:refused]:
            with pytest.raises(
                ValueError, match=f"NVIDIA Some GPU cannot compute in {name}: use one of .*float16"
            ):
                check_dtype(getattr(torch, name), cuda)
        for name in names[refused:]:
            check_dtype(getattr(torch, name), cuda)
