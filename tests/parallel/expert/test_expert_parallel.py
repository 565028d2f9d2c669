"""Expert parallelism: the serial model's numbers on every layout, and the bytes that the formula
says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from layouts import Case, TakeGradient, adamw, one_step, serial, spread, trained, worst
from torch import Tensor, nn

import minidist
from minidist.full import DDP, FSDP
from minidist.full.adjoint import reduce_from
from minidist.full.collectives.fast import cut
from minidist.full.comm import Cluster, Communicator
from minidist.full.comm.threads_wire.cluster import Link
from minidist.full.ddp.buckets import MIB
from minidist.full.expert.dispatch import Dispatch
from minidist.full.expert.expert_parallel import parallelize_experts
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import GPT, GPTConfig, Where, cross_entropy_sum
from minidist.full.model.moe.balance import rebalance
from minidist.full.model.moe.experts import Experts
from minidist.full.model.moe.routed import RoutedExperts, routed_in
from minidist.full.recipe import RecipeError
from minidist.further import Recipe, parallelize

MOE = GPTConfig(
    vocabulary=19, layers=2, hidden=16, heads=4, key_value_heads=2, intermediate=12, sequence=12, dropout=0.1,
    tied=True, experts=7, top_k=2, shared_experts=1, capacity=1.25, balance="aux", balance_rate=0.1, z_loss=0.01,
)  # fmt: skip
BIASED = replace(MOE, balance="bias", balance_rate=0.05, scores="sigmoid", capacity=0.0, z_loss=0.0)
THREE = replace(MOE, hidden=12, heads=6, key_value_heads=3, sequence=10)
FROZEN = ("layers.1.attention.key.weight", "layers.0.mlp.routed.experts.up")
sgd = partial(torch.optim.SGD, lr=0.5)

LAYOUTS = {
    "ep2": (Layout(dp=2, ep=2), Recipe(), MOE),
    "ep3, ZeRO 1": (Layout(dp=3, ep=3), Recipe(zero=1), MOE),
    "ep2 of dp4, ZeRO 2, small buckets": (
        Layout(dp=4, ep=2),
        Recipe(zero=2, bucket_mib=3000 / MIB),
        BIASED,
    ),
    "ep4, ZeRO 3, one copy of each": (Layout(dp=4, ep=4), Recipe(zero=3), BIASED),
    "ep3 of dp6, ZeRO 3": (Layout(dp=6, ep=3), Recipe(zero=3), MOE),
    "tp2": (Layout(tp=2), Recipe(), MOE),
    "tp3 x ep2, uneven tokens and experts": (Layout(dp=2, tp=3, ep=2), Recipe(), THREE),
    "sp2 x ep3, ZeRO 1": (Layout(dp=3, tp=2, ep=3), Recipe(zero=1, sp=True), MOE),
    "cp2 x dp2, ep4": (Layout(dp=2, cp=2, ep=4), Recipe(), MOE),
    "cp3 x tp2, ep3, accumulated": (
        Layout(cp=3, tp=2, ep=3),
        Recipe(microbatches=3, cp_order="striped"),
        MOE,
    ),
    "pp2 x ep2, recomputed": (
        Layout(dp=2, pp=2, ep=2),
        Recipe(schedule="1f1b", microbatches=4, recompute="full"),
        BIASED,
    ),
    "tp2 of dp4, ZeRO 3 in groups of 2": (Layout(dp=4, tp=2), Recipe(zero=3, hsdp=2), MOE),
    "pp2 x ep3, ZeRO 3": (
        Layout(dp=3, pp=2, ep=3),
        Recipe(schedule="gpipe", microbatches=2, zero=3),
        MOE,
    ),
    "pp2, weight gradients put off": (Layout(pp=2), Recipe(schedule="zb-h1", microbatches=4), MOE),
    "pp2 x ep2, put off and reduced": (
        Layout(dp=2, pp=2, ep=2),
        Recipe(schedule="zb-v", microbatches=4),
        replace(MOE, layers=4),
    ),
    "adapters": (Layout(tp=4), Recipe(lora=2), MOE),
}


# with each way to be cut once: those whose steps tell more than their gradients
OFTEN = ("ep2", "ep4, ZeRO 3, one copy of each", "sp2 x ep3, ZeRO 1", "adapters")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(
            name,
            kind,
            marks=[pytest.mark.soak] * (kind is adamw or (kind is sgd and name not in OFTEN)),
            id=f"{name}-{said}",
        )
        for name in LAYOUTS
        for said, kind in (("gradients", TakeGradient), ("sgd", sgd), ("adamw", adamw))
    ],
)
def test_parity(name: str, kind: Callable[..., Any]) -> None:
    """SGD, and the gradients themselves: Adam hides a constant factor, such as a sum that counts ep
    times.
    """
    layout, recipe, config = LAYOUTS[name]
    case = Case(
        layout,
        recipe,
        config,
        frozen=() if recipe.lora else FROZEN,
        steps=1 if kind is TakeGradient else 3,
    )
    assert worst(case, kind) <= 1e-9


@pytest.mark.parametrize(("fp8", "most"), [(False, 1e-9), (True, 0.05)])
def test_a_hierarchy_of_nodes_trains_the_same(fp8: bool, most: float) -> None:
    """Also with rows in 8 bits, up to their rounding: gradients of one step, by their norm."""
    case = Case(
        Layout(dp=4, ep=4), Recipe(ep_comm="hierarchical", ep_fp8=fp8), MOE, frozen=(), steps=1
    )
    exact = serial(case.alone(torch.float64), TakeGradient)[0]
    nodes = Cluster(Link(1e-6, 1e9), Link(1e-5, 1e8), ranks_per_node=2)
    for ours, *_ in minidist.run(lambda comm: trained(comm, case, TakeGradient), 4, cluster=nodes):
        apart = torch.stack([(ours[name] - exact[name]).norm() for name in exact]).norm()
        found = float(apart / torch.stack([value.norm() for value in exact.values()]).norm())
        assert found <= most and (found > 1e-6) is fp8


def test_parity_is_no_luck() -> None:
    """Between the k-th score and the next there is more than roundings could close."""
    for config in (MOE, BIASED):
        model = GPT(config, torch.Generator().manual_seed(0), dtype=torch.float64)
        gaps: list[float] = []
        for layer in routed_in(model):

            def choose(
                scores: Tensor,
                layer: RoutedExperts = layer,
                plain: Any = layer.choose,
                gaps: Any = gaps,
            ) -> Tensor:
                best = scores.detach().sort(-1, descending=True).values
                gaps.append(
                    float((best[..., layer.config.top_k - 1] - best[..., layer.config.top_k]).min())
                )
                chosen: Tensor = plain(scores)
                return chosen

            layer.choose = choose  # type: ignore[method-assign]
        tokens = torch.randint(0, 19, (11, 12), generator=torch.Generator().manual_seed(0))
        model(tokens, Where(7, 0))
        assert len(gaps) == config.layers and min(gaps) > 1e-6


def told(
    counts: list[list[int]], experts: int, hidden: int = 6, how: str = "direct"
) -> list[tuple[float, int, int]]:
    """Send rows by these counts of each rank; return of each how far it is from serial, and what it
    sent in forward.
    """

    def program(comm: Communicator) -> tuple[float, int, int]:
        whole = Experts(experts, hidden, 5).double()
        generator = torch.Generator().manual_seed(0)
        for parameter in whole.parameters():
            parameter.data.normal_(generator=generator)
        held = cut(experts, comm.size)
        first = sum(held[: comm.rank])
        mine = Experts(held[comm.rank], hidden, 5).double()
        for parameter, full in zip(mine.parameters(), whole.parameters(), strict=True):
            parameter.data.copy_(full.data[first : first + len(parameter)])
        levels = comm.levels(2) if how == "hierarchical" else None
        dispatch = Dispatch(mine, comm, levels)
        own = counts[comm.rank]
        rows = torch.randn(
            sum(own), hidden, generator=generator.manual_seed(comm.rank), dtype=torch.float64
        )
        x, y = rows.clone().requires_grad_(), rows.clone().requires_grad_()
        serial = whole(x, own)
        before = comm.traffic.bytes, comm.traffic.messages
        ours = dispatch(y, own)
        sent = comm.traffic.bytes - before[0], comm.traffic.messages - before[1]
        (serial**2).sum().backward()
        (ours**2).sum().backward()
        for parameter in whole.parameters():
            minidist.full.collectives.all_reduce(parameter.grad, comm)
        pairs = [(ours, serial), (y.grad, x.grad)]
        pairs += [
            (p.grad, q.grad[first : first + len(p)])
            for p, q in zip(mine.parameters(), whole.parameters(), strict=True)
        ]  # type: ignore[index]
        apart = max(
            (float((a - b).detach().abs().max()) for a, b in pairs if a is not None and a.numel()),
            default=0.0,
        )
        return apart, *sent

    return minidist.run(program, len(counts))


@pytest.mark.parametrize("how", ("direct", "hierarchical"))
@pytest.mark.parametrize(
    "counts",
    [
        [
            [0, 0, 0, 0, 5, 4, 1],
            [0, 3, 2, 0, 0, 0, 4],
            [1, 1, 1, 1, 1, 1, 1],
            [3, 0, 0, 0, 0, 0, 0],
        ],
        [[0] * 7, [2, 2, 2, 2, 2, 2, 2], [0] * 7, [1, 0, 0, 0, 0, 0, 0]],
        [[0, 0, 0, 9, 0, 0, 0]] * 4,
        [[0] * 7] * 4,
    ],
    ids=("all on foreign experts", "ranks without tokens", "all on one expert", "nothing at all"),
)
def test_any_counts_travel(counts: list[list[int]], how: str) -> None:
    assert max(apart for apart, *_ in told(counts, 7, how=how)) < 1e-9


@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_bytes_of_a_forward(ranks: int) -> None:
    """(P - 1)/P of the rows there and back, and the counts of E experts once; P - 1 messages for
    each of the three.
    """
    experts, each, hidden = 2 * ranks, 5, 6
    for _, bytes, messages in told([[each] * experts] * ranks, experts, hidden):
        assert bytes == (ranks - 1) * (2 * each * 2 * hidden * 8 + 2 * 8)
        assert messages == 3 * (ranks - 1)


def test_a_layer_sends_what_the_formula_says() -> None:
    """2 k tokens D itemsize (ep - 1)/ep forward if balanced, as much again in backward, and small
    counts.
    """
    ranks, config = (
        2,
        GPTConfig(vocabulary=19, layers=1, hidden=16, heads=2, sequence=8, experts=4, top_k=2),
    )

    def program(comm: Communicator) -> tuple[int, int]:
        mesh = Mesh(comm, Layout(dp=ranks, ep=ranks))
        model = GPT(config, dtype=torch.float64)
        parallelize_experts(model, mesh)
        # token t to the experts t and t + 1, modulo 4: perfectly balanced
        for layer in routed_in(model):
            layer.choose = lambda scores: torch.stack(
                [(torch.arange(8) + j) % 4 for j in (0, 1)], -1
            ).expand(3, 8, 2)  # type: ignore[method-assign]
        before = mesh.ep.traffic.bytes
        loss = model(torch.zeros(3, 8, dtype=torch.int64)).sum()
        forward = mesh.ep.traffic.bytes - before
        loss.backward()
        return forward, mesh.ep.traffic.bytes - before - forward

    rows = config.top_k * 3 * 8
    payload, counts = 2 * rows * config.hidden * 8 // ranks, 8 * config.experts // ranks
    assert minidist.run(program, ranks) == [(payload + counts, payload)] * ranks


def test_rows_in_8_bits() -> None:
    """1 + 4/128 bytes an element there; an error of at most 1/16 of each number; gradients come
    back exact.
    """
    hidden, rows = 256, 4

    def program(comm: Communicator) -> tuple[Tensor, Tensor, int, Tensor | None]:
        experts = Experts(1, hidden, 8).double()
        experts.forward = lambda rows, counts: rows  # type: ignore[method-assign]
        x = torch.randn(
            rows, hidden, generator=torch.Generator().manual_seed(comm.rank), dtype=torch.float64
        )
        x[0, :128] *= 1e6  # a scale of its own
        x.requires_grad_()
        before = comm.traffic.bytes
        back = Dispatch(experts, comm, fp8=True)(x, [0, rows] if comm.rank == 0 else [rows, 0])
        sent = comm.traffic.bytes - before
        back.sum().backward()
        return x.detach(), back.detach(), sent, x.grad

    for x, back, sent, gradient in minidist.run(program, 2):
        assert float(((back - x).abs() / x.abs().clamp(min=x.abs().amax() * 1e-9)).max()) <= 1 / 16
        assert not torch.equal(back, x)
        assert sent == rows * hidden * (1 + 4 / 128) + rows * hidden * 8 + 8
        assert gradient is not None and torch.equal(gradient, torch.ones_like(x))


def chosen(comm: Communicator, case: Case) -> tuple[dict[int, list[int]], list[tuple[float, int]]]:
    """Train as one rank; return the biases by layer, and the loads of the steps."""
    parallel = spread(comm, case)
    optimizer = parallel.optimizer(adamw, [{"params": list(parallel.model.parameters())}])
    loads = []
    for step in range(case.steps):
        parallel.zero_grad()
        one_step(parallel, case, step)
        assert parallel.load is not None
        loads.append((parallel.load.imbalance, parallel.load.dropped))
        optimizer.step()
    return {layer.index: layer.bias.tolist() for layer in routed_in(parallel.model)}, loads


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        (Layout(dp=2, ep=2), Recipe(recompute="full")),
        (Layout(dp=4, ep=2), Recipe(zero=3, microbatches=2)),
        (Layout(cp=2, tp=2, ep=2), Recipe(sp=True)),
        (Layout(pp=2, dp=2, ep=2), Recipe(schedule="zb-h1", microbatches=4, recompute="full")),
    ],
)
def test_biases_and_what_is_dropped_are_those_of_the_serial_run(
    layout: Layout, recipe: Recipe
) -> None:
    config = replace(BIASED, capacity=1.0)
    case = Case(layout, recipe, config, steps=3, frozen=())
    ((biases, loads),) = minidist.run(
        lambda comm: chosen(comm, replace(case, layout=Layout(), recipe=Recipe())), 1
    )
    assert any(any(bias) for bias in biases.values()) and all(dropped for _, dropped in loads)
    for mine, same in minidist.run(lambda comm: chosen(comm, case), layout.size):
        assert mine.items() <= biases.items() and same == loads


def dropped(comm: Communicator, layout: Layout, recipe: Recipe) -> set[tuple[int, int, int, int]]:
    """Return (row, position, expert, layer) of all that is dropped in a forward on this rank."""
    case = Case(layout, recipe, replace(MOE, capacity=0.75, dropout=0.0), frozen=())
    parallel, found = spread(comm, case), set()
    for layer in routed_in(parallel.model):

        def see(
            choice: Tensor, where: Where, layer: RoutedExperts = layer, plain: Any = layer.kept
        ) -> Tensor:
            kept: Tensor = plain(choice, where)
            rows = where.row_numbers(choice.shape[0], choice.device)
            positions = where.position_numbers(choice.shape[1], choice.device)
            for b, t, j in (~kept).nonzero().tolist():
                found.add((int(rows[b]), int(positions[t]), int(choice[b, t, j]), layer.index))
            return kept

        layer.kept = see  # type: ignore[method-assign]
    one_step(parallel, case, 0)
    return found


@pytest.mark.parametrize(
    "layout", (Layout(dp=3, ep=3), Layout(cp=2, tp=2, ep=2), Layout(tp=4), Layout(dp=2, pp=2))
)
def test_the_same_choices_are_dropped_on_every_layout(layout: Layout) -> None:
    recipe = Recipe(microbatches=2 if layout.pp > 1 else 1)
    (alone,) = minidist.run(lambda comm: dropped(comm, Layout(), Recipe()), 1)
    parts = minidist.run(lambda comm: dropped(comm, layout, recipe), layout.size)
    assert alone and set().union(*parts) == alone


def router_gradient(comm: Communicator, layout: Layout, microbatches: int, scale: float) -> Tensor:
    """Return the routers' gradient of the auxiliary losses alone, gathered over the pipeline, over
    the scale.
    """
    mesh, config = Mesh(comm, layout), replace(MOE, dropout=0.0)
    model = GPT(config, torch.Generator().manual_seed(0), dtype=torch.float64)
    recipe = Recipe(microbatches=microbatches, sp=layout.tp > 1)
    case = Case(layout, recipe, config, frozen=())

    def carried(x: Tensor) -> Tensor:
        return torch.empty(len(x), x.shape[1], config.hidden, dtype=torch.float64, device="meta")

    parallel = parallelize(model, mesh, recipe, lambda logits, _: logits.sum() * 0, carried)
    one_step(parallel, case, 0, scale)
    mine = {}
    for layer in routed_in(parallel.model):
        mine[layer.index] = layer.router.grad.clone() / scale  # type: ignore[union-attr]
    everywhere = {
        index: value for held in mesh.pp.all_gather_object(mine) for index, value in held.items()
    }
    return torch.stack([everywhere[index] for index in sorted(everywhere)])


@pytest.mark.parametrize(
    ("layout", "microbatches", "scale"),
    [
        (Layout(), 4, 1.0),
        (Layout(), 1, 2.0**10),
        (Layout(dp=3, ep=3), 2, 2.0**10),
        (Layout(cp=2), 1, 1.0),
        (Layout(tp=2), 2, 1.0),
        (Layout(pp=2, dp=2, ep=2), 2, 2.0**10),
    ],
)
def test_the_auxiliary_loss_alone_is_one_number(
    layout: Layout, microbatches: int, scale: float
) -> None:
    (alone,) = minidist.run(lambda comm: router_gradient(comm, Layout(), 1, 1.0), 1)
    assert float(alone.abs().max()) > 1e-6
    for gradient in minidist.run(
        lambda comm: router_gradient(comm, layout, microbatches, scale), layout.size
    ):
        assert float((gradient - alone).abs().max()) <= 1e-12 * float(alone.abs().max())


@pytest.mark.parametrize(
    ("config", "layout", "recipe", "sentence"),
    [
        (MOE, Layout(dp=2, ep=2), Recipe(strategy="naive"), "experts have fewer copies than all else, which naive"),
        (MOE, Layout(dp=2, ep=2), Recipe(zero=3, hsdp=1), "ep=2: experts have fewer copies than all else"),
        (MOE, Layout(dp=2, ep=2), Recipe(zero=3, zeropp=True), "which ZeRO[+][+] does not know"),
        (MOE, Layout(dp=8, ep=8), Recipe(), "ep=8: 7 experts are fewer than the 8 ranks of ep and tp: use at most 7"),
        (MOE, Layout(dp=2, ep=2), Recipe(ep_comm="star"), "there is no way 'star' to reach experts: choose"),
        (MOE, Layout(dp=2, ep=2), Recipe(ep_comm="hierarchical"), "ranks 0, 1 lie on nodes of 2: use the way 'direct'"),
        (GPTConfig(hidden=16, heads=2), Layout(dp=2, ep=2), Recipe(), "ep=2: the model has no experts to share out"),
    ],
)  # fmt: skip
def test_what_is_refused(config: GPTConfig, layout: Layout, recipe: Recipe, sentence: str) -> None:
    def program(comm: Communicator) -> None:
        mesh = Mesh(comm, layout)
        before = comm.traffic.messages
        with pytest.raises(RecipeError, match=sentence):
            parallelize(GPT(config), mesh, recipe, lambda logits, _: logits.sum())
        assert comm.traffic.messages == before

    minidist.run(program, layout.size)


def test_a_strategy_that_would_divide_by_the_wrong_number_is_refused() -> None:
    def program(comm: Communicator) -> None:
        mesh, model = Mesh(comm, Layout(dp=2, ep=2)), GPT(MOE)
        parallelize_experts(model, mesh)
        for strategy in (DDP, FSDP):
            with pytest.raises(
                ValueError, match="op='mean' would divide shared-out experts by their copies"
            ):
                strategy(model, mesh.data, op="mean")
        with pytest.raises(ValueError, match="shard_ranks=1 knows no experts"):
            FSDP(model, mesh.data, op="sum", shard_ranks=1)

    minidist.run(program, 2)


def test_a_sharded_model_loads_and_returns_the_biases() -> None:
    serial_model = GPT(BIASED)
    routed_in(serial_model)[1].bias[3] = 7

    def program(comm: Communicator) -> list[int]:
        model = FSDP(GPT(BIASED), comm, op="sum")
        model.load(serial_model.state_dict())
        state = model.full_state_dict()
        assert state.keys() == serial_model.state_dict().keys()
        return state["layers.1.mlp.routed._extra_state"].tolist()

    assert minidist.run(program, 2) == [[0, 0, 0, 7, 0, 0, 0]] * 2


def test_ranks_begin_with_the_biases_of_rank_0() -> None:
    """Others would send the same tokens to other experts, step after step, without a word."""

    def program(comm: Communicator) -> list[int]:
        model = GPT(BIASED)
        routed_in(model)[0].bias[2] = 5 + comm.rank
        DDP(model, comm, op="sum")
        return routed_in(model)[0].bias.tolist()

    assert minidist.run(program, 3) == [[0, 0, 5, 0, 0, 0, 0]] * 3


def test_each_layer_s_experts_may_be_a_unit_of_their_own() -> None:
    """Then their hooks gather them: who calls `forward` past the hooks computes with nothing."""
    tokens = torch.randint(0, 19, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = GPT(replace(MOE, dropout=0.0))(tokens)

    def program(comm: Communicator) -> Tensor:
        model = FSDP(
            GPT(replace(MOE, dropout=0.0)),
            comm,
            op="sum",
            policy=lambda module: isinstance(module, Experts),
        )
        found: Tensor = model(tokens)
        found.sum().backward()
        return found.detach()

    for found in minidist.run(program, 2):
        torch.testing.assert_close(found, expected)


def test_experts_of_a_rank_are_all_that_it_holds() -> None:
    def program(comm: Communicator) -> list[int]:
        mesh, model = Mesh(comm, Layout(dp=3, ep=3)), GPT(MOE)
        parallelize_experts(model, mesh)
        return [
            layer.experts.gate.untyped_storage().nbytes() // (12 * 16 * 4)
            for layer in routed_in(model)
        ]

    assert minidist.run(program, 3) == [[3, 3], [2, 2], [2, 2]]


def test_a_user_s_own_loop() -> None:
    """Without `parallelize`: experts shared out, then DDP, a loop, and `rebalance`."""
    config = replace(BIASED, dropout=0.0)
    tokens = torch.randint(0, 19, (4, 13), generator=torch.Generator().manual_seed(1))

    def program(comm: Communicator, ep: int) -> tuple[Tensor, list[int]]:
        mesh = Mesh(comm, Layout(dp=comm.size, ep=ep))
        model = GPT(config, dtype=torch.float64)
        parallelize_experts(model, mesh)
        ddp: nn.Module = DDP(model, mesh.data, op="sum") if comm.size > 1 else model
        mine = tokens.tensor_split(comm.size)[comm.rank]
        loss = cross_entropy_sum(ddp(mine[:, :-1], Where(weight=1 / 48)), mine[:, 1:]) / 48
        loss.backward()  # type: ignore[no-untyped-call]
        rebalance(model, partial(reduce_from, comm=comm))
        return model.layers[0].mlp.routed.router.grad, model.layers[1].mlp.routed.bias.tolist()  # type: ignore[union-attr, return-value]

    ((gradient, bias),) = minidist.run(lambda comm: program(comm, 1), 1)
    for ours, same in minidist.run(lambda comm: program(comm, 2), 4):
        assert float((ours - gradient).abs().max()) <= 1e-12 and same == bias
