"""Lines of a user's own loop that ask about all of a gradient: they get the serial model's answer
on every rank.
"""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

import minidist
from minidist.full import (
    DDP,
    FSDP,
    ColumnParallel,
    NaiveDataParallel,
    RowParallel,
    ZeRO1,
    ZeRO2,
    clip_by_global_norm,
    parallelize_tensor,
    vocabulary_parallel_cross_entropy_sum,
)
from minidist.full.comm import Communicator
from minidist.full.gradients.gradient import PartOfGradient
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import GPT, GPTConfig, cross_entropy_sum
from minidist.full.placement import placement_of
from minidist.further import Recipe, ShardedOptimizer, parallelize

LIMIT = 0.7
Run = tuple[list[float], list[Tensor]]
Wrap = Callable[[nn.Module, Communicator], Any]


def net() -> nn.Sequential:
    """Layers whose elements no number of ranks divides, and a frozen bias."""
    draws = torch.Generator().manual_seed(0)
    layers = [nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 3)]
    model = nn.Sequential(*layers).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=draws)
    model[4].bias.requires_grad_(False)
    return model


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(
        4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank)
    )


def cut(comm: Communicator, wrap: Wrap | None = None) -> tuple[nn.Module, Any, int]:
    """Return the model, cut along a tensor axis of two and wrapped along the rest; what to call;
    and which data.
    """
    model, mesh = net(), Mesh(comm, Layout(dp=comm.size // 2, tp=2))
    parallelize_tensor(model, mesh.tp, {"0": ColumnParallel(), "2": RowParallel()})
    return model, wrap(model, mesh.dp) if wrap else model, mesh.dp.rank


def optimizer_of(called: Any, kind: Any, **options: Any) -> Any:
    return (
        called.optimizer(kind, **options)
        if isinstance(called, ZeRO1 | FSDP)
        else kind(called.parameters(), **options)
    )


def train(
    model: nn.Module, called: Any, ranks: list[int], clip: Callable[[Any], Tensor]
) -> list[float]:
    """Take three steps on these ranks' rows; return the norms before clipping."""
    optimizer, norms = optimizer_of(called, SGD, lr=0.05, momentum=0.9), []
    for step in range(3):
        optimizer.zero_grad()
        for rank in ranks:
            called(rows(step, rank)).square().sum().backward()
        if isinstance(called, NaiveDataParallel):
            called.synchronize()
        norms.append(float(clip(called)))
        optimizer.step()
    if isinstance(called, ZeRO1 | FSDP):
        called.unwrap()
    return norms


# ranks, and rows of data
WAYS: dict[str, tuple[int, int, Callable[[Communicator], tuple[nn.Module, Any, int]]]] = {}
for kind in (DDP, ZeRO1, ZeRO2, FSDP):

    def alone(comm: Communicator, kind: Any = kind) -> tuple[nn.Module, Any, int]:
        model = net()
        return model, kind(model, comm, op="sum"), comm.rank

    def both(comm: Communicator, kind: Any = kind) -> tuple[nn.Module, Any, int]:
        return cut(comm, lambda model, dp: kind(model, dp, op="sum"))

    WAYS[kind.__name__] = (3, 3, alone)
    WAYS[f"{kind.__name__}, tensor parallel"] = (4, 2, both)
WAYS["tensor parallel"] = (2, 1, cut)
WAYS["naive, tensor parallel"] = (
    4,
    2,
    lambda comm: cut(comm, lambda m, dp: NaiveDataParallel(m, dp, op="sum")),
)
EACH = pytest.mark.parametrize("way", WAYS)


def compare(
    way: str, clip: Callable[[Any], Tensor], serially: Callable[[Any], Tensor] | None = None
) -> None:
    """Assert that every rank has the serial norms to 1e-12, and the serial parameters to 1e-9."""
    ranks, data, make = WAYS[way]

    def program(comm: Communicator) -> Run:
        model, called, own = make(comm)
        norms = train(model, called, [own], clip)
        records = [(p.detach(), placement_of(p).block) for p in model.parameters()]
        return norms, [record.full(value) if record else value for value, record in records]

    model = net()
    norms = train(model, model, [*range(data)], serially or clip)
    for found, parameters in minidist.run(program, ranks):
        assert found == pytest.approx(norms, rel=1e-12)
        for ours, theirs in zip(parameters, model.parameters(), strict=True):
            assert (ours - theirs).abs().max() <= 1e-9 * theirs.abs().max()


# ---------------------------------------------------------------- clipping


@EACH
@pytest.mark.parametrize("foreach", (None, True))
def test_torchs_clip_is_right(way: str, foreach: bool | None) -> None:
    compare(way, lambda called: clip_grad_norm_(called.parameters(), LIMIT, foreach=foreach))


@pytest.mark.parametrize("order", (math.inf, 1.0, 3.0))
@pytest.mark.parametrize("way", ("ZeRO2", "FSDP, tensor parallel", "tensor parallel"))
def test_torchs_clip_is_right_in_other_norms(way: str, order: float) -> None:
    compare(way, lambda called: clip_grad_norm_(called.parameters(), LIMIT, order))


@EACH
def test_our_clip_finds_the_axes_itself(way: str) -> None:
    compare(
        way,
        lambda called: clip_by_global_norm(called.parameters(), LIMIT),
        lambda called: clip_grad_norm_(called.parameters(), LIMIT),
    )


def test_a_head_that_two_ranks_share_counts_once() -> None:
    config = GPTConfig(vocabulary=13, layers=1, hidden=16, heads=4, key_value_heads=2, sequence=4)
    tokens = torch.arange(8).view(2, 4)

    def build() -> GPT:
        return GPT(config, torch.Generator().manual_seed(0), dtype=torch.float64)

    def program(comm: Communicator) -> list[float]:
        model = build()
        parallelize_tensor(model, comm)
        vocabulary_parallel_cross_entropy_sum(model(tokens), tokens, comm, 13).backward()
        return [
            float(clip(model.parameters(), 1e9)) for clip in (clip_grad_norm_, clip_by_global_norm)
        ]

    model = build()
    cross_entropy_sum(model(tokens), tokens).backward()
    norm = float(clip_grad_norm_(model.parameters(), 1e9))
    for found in minidist.run(program, 4):
        assert found == pytest.approx([norm, norm], rel=1e-12)


def test_slices_can_be_clipped_too() -> None:
    for way in ("ZeRO1", "FSDP"):
        compare(
            way,
            lambda called: clip_grad_norm_(getattr(called, "slices", called.parameters()), LIMIT),
        )


def test_an_axis_that_is_passed_as_well_is_not_counted_twice() -> None:
    def program(comm: Communicator) -> None:
        mesh = Mesh(comm, Layout(dp=2, tp=2))
        model = net()
        parallelize_tensor(model, mesh.tp, {"0": ColumnParallel(), "2": RowParallel()})
        model(rows(0, 0)).square().sum().backward()
        norm = clip_by_global_norm(model.parameters(), 0)
        assert norm == clip_by_global_norm(model.parameters(), 0, mesh.tp)
        # the same ranks
        assert norm == clip_by_global_norm(model.parameters(), 0, comm.split(comm.rank // 2))
        with pytest.raises(
            ValueError, match=r"ranks \[0, 1, 2, 3\] would count twice what \[(0, 1|2, 3)\] share"
        ):
            clip_by_global_norm(model.parameters(), 0, comm)

    minidist.run(program, 4)


# ---------------------------------------------------------------- scaling


@pytest.mark.parametrize("fused", (False, True))
@pytest.mark.parametrize("way", [*WAYS, "ShardedOptimizer"])
def test_torchs_scaler_skips_a_step_on_all_ranks(way: str, fused: bool) -> None:
    """One rank overflows in step 1: all leave the step out, and halve their scale; they never drift
    apart.
    """
    alone = way == "ShardedOptimizer"
    ranks, _, make = WAYS["DDP" if alone else way]

    def program(comm: Communicator) -> tuple[list[float], list[bool]]:
        model, called, own = make(comm)
        options = {"lr": 0.01, "fused": fused}
        optimizer = ShardedOptimizer(model.parameters(), AdamW, comm, **options) if alone else None
        optimizer = optimizer or optimizer_of(called, AdamW, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        values = called.slices if isinstance(called, ZeRO1 | FSDP) else list(model.parameters())
        scales, moved = [], []
        hit = comm.rank == ranks - 1  # one rank alone, unless others have the same gradient
        if not isinstance(called, ZeRO1 | FSDP) and way != "tensor parallel":
            hit = "tensor" not in way or comm.rank % 2 == 1
        for step in range(4):
            optimizer.zero_grad()
            loss = called(rows(step, own)).square().sum()
            scaler.scale(loss).backward()
            if isinstance(called, NaiveDataParallel):
                called.synchronize()
            if step == 1 and hit:
                part = next(p.grad for p in values if p.grad is not None and p.grad.numel())
                part.as_subclass(Tensor).view(-1)[0] = math.inf
            before = [value.detach().clone() for value in values]
            if step == 2:
                scaler.unscale_(optimizer)
                assert float(clip_grad_norm_(called.parameters(), 1e9)) < 1e4, "not unscaled"
            scaler.step(optimizer)
            scaler.update()
            pairs = zip(before, values, strict=True)
            moved.append(any(not torch.equal(was, now) for was, now in pairs if was.numel()))
            scales.append(scaler.get_scale())
        return scales, moved

    for scales, moved in minidist.run(program, ranks):
        assert scales == [1024, 512, 512, 1024] and moved == [True, False, True, True]


# ---------------------------------------------------------------- stages


def pipeline(comm: Communicator) -> Any:
    config = GPTConfig(vocabulary=13, layers=2, hidden=8, heads=2, sequence=4)
    mesh = Mesh(comm, Layout(pp=2))
    model = GPT(config, torch.Generator().manual_seed(0), dtype=torch.float64)
    carried = torch.empty(2, 4, 8, dtype=torch.float64, device="meta")
    spread = parallelize(model, mesh, Recipe(microbatches=1), cross_entropy_sum, lambda _: carried)
    tokens = torch.arange(8).view(2, 4)
    spread.step([tokens], [tokens])
    return spread


def test_a_stage_refuses_to_clip_or_to_unscale_for_itself() -> None:
    def program(comm: Communicator) -> None:
        spread = pipeline(comm)
        parameters = list(spread.model.parameters())
        for foreach in (None, True):
            with pytest.raises(
                ValueError, match=r"stages of a pipeline have different .* use clip_by_global_norm"
            ):
                clip_grad_norm_(parameters, 1.0, foreach=foreach)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(
            ValueError, match=r"only some may overflow: use LossScaler\(mesh.world\)"
        ):
            scaler.step(AdamW(parameters))
        norm = clip_by_global_norm(parameters, 0)
        assert norm == spread.clip(0) == clip_by_global_norm(parameters, 0, spread.mesh.pp)
        total = sum(float(p.grad.norm()) ** 2 for p in parameters if p.grad is not None)
        assert float(norm) ** 2 == pytest.approx(sum(comm.all_gather_object(total)), rel=1e-12)

    minidist.run(program, 2)


# ---------------------------------------------------------------- what is asked of one gradient

QUESTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "the snippet of every forum": lambda g: g.detach().data.norm(2),
    "a float's": lambda g: g.float().norm(),
    "inf": lambda g: torch.linalg.vector_norm(g, math.inf),
    "linalg": lambda g: torch.linalg.norm(g),
    "torch.norm": lambda g: torch.norm(g / 2),
    "squares": lambda g: (g**2).sum(),
    "largest": lambda g: g.abs().max(),
    "finite": lambda g: torch.isfinite(g).all(),
    "bad": lambda g: (~g.isfinite()).any(),
    "laid flat": lambda g: g.view(-1).norm(),
    "smallest": lambda g: (2 - -g / 3).min(),
    "bent": lambda g: (1 / g.lerp(g * 0, 0.5).square().clamp(1)).sum(),
    "in between": lambda g: ((g > 0) & (g < 3)).sum(),
    "of others": lambda g: torch.where(g > 0, g, 0).clamp_min(1).sum(),
    "named": lambda g: torch.clamp(input=g, min=0).sum(),
    "each": lambda g: torch._foreach_mul(torch._foreach_abs([g]), 2)[0].sum(),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_for_the_whole(question: str) -> None:
    ask, values = QUESTIONS[question], torch.arange(-5.0, 12.0).double()
    for values[12] in (7.0, math.inf) if question in ("finite", "bad") else (7.0,):

        def program(comm: Communicator) -> None:
            model = nn.ParameterList([values.clone()])
            wrapped = FSDP(model, comm, op="sum")
            (piece,) = wrapped.slices
            mine = values[piece.placement.slice.start : piece.placement.slice.stop].clone()  # type: ignore[attr-defined]
            wrapped.flat_of[model[0]].shard.gradient = mine
            wrapped.flat_of[model[0]].shard.give_gradient(set())
            for gradient in (piece.grad, model[0].grad):
                assert isinstance(gradient, PartOfGradient)
                answer, expected = ask(gradient), ask(values)
                assert type(answer) is Tensor and answer.dtype == expected.dtype
                assert float(answer) == pytest.approx(float(expected), rel=1e-6)
                for along in (lambda g: g.norm(dim=0), lambda g: torch.norm(g, 2, 0)):
                    with pytest.raises(ValueError, match="a norm along a dim"):
                        along(gradient)

        minidist.run(program, 3)


def test_what_looks_at_rows_is_refused_and_optimizers_keep_plain_state() -> None:
    def program(comm: Communicator) -> None:
        model, _, _ = cut(comm)
        model(rows(0, 0)).square().sum().backward()
        optimizers = [
            AdamW(model.parameters()),
            SGD(model.parameters(), momentum=0.9, weight_decay=0.1),
        ]
        optimizers.append(SGD(model.parameters(), momentum=0.9, foreach=False, nesterov=True))
        for optimizer in optimizers:
            optimizer.step()
            kept = [value for state in optimizer.state.values() for value in state.values()]
            assert all(type(value) is Tensor for value in kept if isinstance(value, Tensor))
        block = next(p for p in model.parameters() if type(p.grad) is not Tensor)
        with pytest.raises(ValueError, match="a norm along a dim"):
            torch.linalg.vector_norm(block.grad, dim=0)  # as Adafactor asks for

    minidist.run(program, 2)


# ---------------------------------------------------------------- parameters and their copies


@pytest.mark.parametrize("kind", (ZeRO1, ZeRO2, FSDP))
def test_a_sharded_parameter_shows_and_forgets_the_gradient_of_its_slice(kind: Any) -> None:
    def program(comm: Communicator) -> None:
        model = net()
        wrapped = kind(model, comm, op="sum")
        wrapped(rows(0, comm.rank)).square().sum().backward()
        for parameter in wrapped.parameters_to_reduce:
            piece = wrapped.slice_of(parameter)
            assert parameter.grad is piece.grad is not None
            parameter.grad = None
            assert parameter.grad is piece.grad is None
        wrapped(rows(0, comm.rank)).square().sum().backward()
        model.zero_grad()  # torch's own, of the model inside
        assert all(piece.grad is None for piece in wrapped.slices)
        weight = model[0].weight
        if kind is not FSDP:
            for twin in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
                assert type(twin) is nn.Parameter and torch.equal(twin, weight)
        wrapped.unwrap()
        assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}

    minidist.run(program, 2)


@pytest.mark.parametrize("way", ("replaced", "by autograd.grad", "unfrozen"))
def test_a_gradient_that_somebody_else_has_put_there_is_a_part_too(way: str) -> None:
    """Under tensor parallelism: the norm is the serial one, whoever has made the gradient."""

    def norm(model: nn.Module) -> float:
        if way == "unfrozen":
            model.requires_grad_(True)
        loss = model(rows(0, 0)).square().sum()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if way == "by autograd.grad":
            for parameter, gradient in zip(
                trained, torch.autograd.grad(loss, trained), strict=True
            ):
                parameter.grad = gradient
        else:
            loss.backward()
        if way == "replaced":
            for parameter in trained:
                assert parameter.grad is not None
                parameter.grad = parameter.grad.clone()
        return float(clip_grad_norm_(model.parameters(), LIMIT))

    def program(comm: Communicator) -> float:
        model = net()
        if way == "unfrozen":
            model.requires_grad_(False)
        parallelize_tensor(model, comm, {"0": ColumnParallel(), "2": RowParallel()})
        return norm(model)

    assert minidist.run(program, 2) == pytest.approx([norm(net())] * 2, rel=1e-12)


@pytest.mark.parametrize("way", ("ZeRO1", "FSDP", "tensor parallel"))
def test_del_forgets_a_gradient_as_with_torchs_parameters(way: str) -> None:
    ranks, _, make = WAYS[way]

    def program(comm: Communicator) -> bool:
        model, called, own = make(comm)
        called(rows(0, own)).square().sum().backward()
        there = [parameter.grad is not None for parameter in model.parameters()]
        for parameter in model.parameters():
            del parameter.grad
        return any(there) and all(parameter.grad is None for parameter in model.parameters())

    assert all(minidist.run(program, ranks))


def test_marks_keep_nothing_alive() -> None:
    def program(comm: Communicator) -> list[weakref.ref[Any]]:
        model, called, own = cut(comm, lambda model, dp: FSDP(model, dp, op="sum"))
        called(rows(0, own)).square().sum().backward()
        clip_grad_norm_(called.parameters(), 1.0)
        kept = [*model.parameters(), *called.slices, *(p.grad for p in called.slices)]
        return [weakref.ref(it) for it in (called, *kept)]

    found = minidist.run(program, 4)
    gc.collect()
    assert all(reference() is None for references in found for reference in references)


def test_copies_of_a_part_are_plain() -> None:
    def program(comm: Communicator) -> None:
        model, _, _ = cut(comm)
        model(rows(0, 0)).square().sum().backward()
        gradient: Any = model[0].weight.grad
        assert isinstance(gradient, PartOfGradient)
        twin = gradient.clone()
        assert type(twin) is Tensor and torch.equal(twin, gradient.as_subclass(Tensor))
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(ValueError, match="this rank has only a part of the gradient"):
                copied(gradient)
        first = gradient
        model(rows(1, 0)).square().sum().backward()
        assert model[0].weight.grad is first, "autograd adds in place"

    minidist.run(program, 2)


@pytest.mark.parametrize("kind", (DDP, ZeRO1, ZeRO2, FSDP))
def test_what_is_changed_between_two_backwards_stays_changed(kind: Any) -> None:
    """In place, through parameters or through what the optimizer updates, as on one rank."""

    def program(comm: Communicator) -> None:
        model = net()
        wrapped = kind(model, comm, op="mean")
        optimizer = wrapped.optimizer(SGD, lr=0.1)

        def norm() -> float:
            wrapped(rows(0, 0)).square().sum().backward()
            return float(torch.nn.utils.clip_grad_norm_(wrapped.parameters(), math.inf))

        once = norm()
        for parameter in wrapped.parameters_to_reduce:
            parameter.grad.zero_()
        assert norm() == pytest.approx(once, rel=1e-12)
        for parameter in wrapped.parameters_to_reduce:
            parameter.grad.mul_(0.5)
        assert norm() == pytest.approx(1.5 * once, rel=1e-12)
        for group in optimizer.param_groups:
            for piece in group["params"]:
                piece.grad = None
        assert norm() == pytest.approx(once, rel=1e-12)

    minidist.run(program, 2)


OF_THIS_RANK_ALONE: tuple[Callable[[Tensor], object], ...] = (
    lambda g: g.sum(0),
    lambda g: g.max(dim=0),
    lambda g: g.mean(-1),
    lambda g: torch.all(g > 0, 0),
    lambda g: g @ torch.ones(len(g)).double(),
    lambda g: torch.ones(len(g)).double() @ g,
    lambda g: torch.mv(torch.ones(2, len(g)).double(), g),
    lambda g: torch.einsum("i,i->", g, g),
    lambda g: torch.einsum("i,i->", [g, g]),
    lambda g: torch.linalg.vecdot(g, g),
    lambda g: nn.functional.cosine_similarity(g, g, dim=0),
    lambda g: nn.functional.normalize(g, dim=0),
    lambda g: nn.functional.mse_loss(g, torch.zeros_like(g)),
    lambda g: nn.HuberLoss()(torch.zeros_like(g), target=g),
    lambda g: g.softmax(0),
    lambda g: g[0],
    lambda g: g[[0, 1]],
    lambda g: g[:1],
    lambda g: list(g),
    lambda g: g.tolist(),
    lambda g: g.detach().numpy(),
    lambda g: g.unique(),
    lambda g: g.nonzero(),
    lambda g: g.masked_select(g > 0),
    lambda g: g.gather(0, torch.tensor([0])),
    lambda g: g.chunk(2),
    lambda g: torch._foreach_max([g]),
    lambda g: torch.cat([g, torch.ones(2)])[0],
    lambda g: torch.cat([g, torch.ones(2)]).std(),
    lambda g: 1.0 in g,
    lambda g: g.normal_(),
    lambda g: g.uniform_(),
    lambda g: g.add_(torch.randn_like(g)),
    lambda g: nn.functional.dropout(g, 0.5, inplace=True),
    lambda g: g.norm(0),
    lambda g: g.norm(-math.inf),
    lambda g: g.norm("nuc"),
    lambda g: g.std(),
    lambda g: torch.median(g),
    lambda g: g.flatten().topk(1),
    lambda g: g.sum(dtype=torch.float32),
    lambda g: torch.cat([g, g]),
    lambda g: torch.equal(g, g),
    lambda g: torch.max(g, torch.ones_like(g)),
    lambda g: g.__setitem__(0, 0),
    lambda g: g[g > 0],
    lambda g: torch.ones(7, 1) * g,
)


def test_what_only_this_rank_could_answer_is_refused() -> None:
    """So is what is new in torch: no list names it."""

    def program(comm: Communicator) -> None:
        wrapped = FSDP(net(), comm, op="sum")
        wrapped(rows(0, 0)).square().sum().backward()
        gradient: Any = next(iter(wrapped.parameters())).grad
        gradient[gradient > 0] = 0.0
        assert (gradient <= 0).all()
        before = gradient.clone()
        for ask in OF_THIS_RANK_ALONE:
            with pytest.raises(ValueError, match="this rank has only a part of the gradient"):
                ask(gradient)
        with pytest.raises(RuntimeError, match="size of tensor"):
            gradient.add_(torch.ones(7, 5))
        assert torch.equal(gradient.clone(), before)
        with pytest.raises(TypeError, match="use its full_state_dict"):
            wrapped.module[0].state_dict()

    minidist.run(program, 2)


@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
def test_a_part_travels_as_any_tensor(dtype: torch.dtype) -> None:
    """Collectives cut a buffer where they like."""

    def program(comm: Communicator) -> list[float]:
        model = nn.Sequential(nn.Linear(4, 4, bias=False, dtype=dtype))
        wrapped = FSDP(model, comm, op="sum")
        wrapped(torch.ones(2, 4, dtype=dtype)).sum().backward()
        gradient: Any = wrapped.module[0].weight.grad
        sent = gradient.view(-1).fill_(comm.rank + 1)
        assert isinstance(sent, PartOfGradient)
        minidist.full.collectives.all_reduce(sent, comm)
        plain: list[float] = sent.as_subclass(Tensor).tolist()
        return plain

    assert {value for values in minidist.run(program, 2) for value in values} == {3.0}


@pytest.mark.parametrize("kind", (DDP, ZeRO2, FSDP))
def test_a_parameter_that_is_unfrozen_is_noticed_in_evaluation_too(kind: Any) -> None:
    def program(comm: Communicator) -> None:
        model = net()
        last = list(model.parameters())[-1].requires_grad_(False)
        wrapped = kind(model, comm, op="sum").eval()
        last.requires_grad_(True)
        wrapped(rows(0, 0))  # looking at it is allowed
        with pytest.raises(
            RuntimeError, match="added, replaced, resized or unfrozen after wrapping"
        ):
            wrapped(rows(0, 0)).sum().backward()

    minidist.run(program, 1)
