"""Every strategy together: layouts of up to 8 ranks train the model of the serial run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from layouts import SMALL, Case, build, one_step, spread, tokens, worst
from torch import Tensor, nn

import minidist
from minidist.full import RecipeError, vocabulary_parallel_cross_entropy_sum
from minidist.full.collectives import all_reduce
from minidist.full.comm import Communicator
from minidist.full.ddp.buckets import MIB
from minidist.full.memory.account import Account
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import GPT, cross_entropy_sum
from minidist.full.pipeline import plan, read_plan
from minidist.further import Recipe, parallelize

TP2, PP2, DP2 = Layout(tp=2), Layout(pp=2), Layout(dp=2)
EIGHT = Layout(dp=2, pp=2, tp=2)


@pytest.mark.parametrize(
    ("layout", "zero"),
    [(layout, 0) for layout in (TP2, PP2, Layout(pp=2, tp=2))]  # whose data axis has one rank
    + [
        pytest.param(layout, zero, marks=[pytest.mark.soak] * (layout != EIGHT and zero in (0, 2)))
        for layout in (Layout(dp=2, tp=2), Layout(dp=2, pp=2), EIGHT)
        for zero in range(4)
    ],
    ids=str,
)
def test_parity_on_every_layout(layout: Layout, zero: int) -> None:
    assert worst(Case(layout, Recipe(zero=zero, microbatches=4))) <= 1e-9


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=3, pp=2),
        Layout(pp=4, tp=2),
        *(
            pytest.param(each, marks=pytest.mark.soak)
            for each in (Layout(dp=3), Layout(dp=4, tp=2), Layout(pp=3))
        ),
    ],
    ids=str,
)
def test_parity_where_sizes_do_not_divide(layout: Layout) -> None:
    assert worst(Case(layout, Recipe(zero=1, microbatches=3, recompute="every 3"))) <= 1e-9


@pytest.mark.parametrize(
    "name, chunks",
    [
        pytest.param("naive", 1, marks=pytest.mark.soak),
        ("interleaved", 2),
        ("zb1p", 2),
        pytest.param("zb-h1", 1, marks=pytest.mark.soak),
        ("zb-v", 1),
        ("dualpipe-v", 1),
    ],
)
def test_every_schedule_under_tensor_and_sequence_parallelism(name: str, chunks: int) -> None:
    """Untied, as the deferred products of cut layers matter most where the head has its own."""
    recipe = Recipe(
        schedule=name, chunks=chunks, microbatches=4, sp=True, zero=1, recompute="selective"
    )
    assert worst(Case(EIGHT, recipe, replace(SMALL, tied=False))) <= 1e-9


def test_the_ends_count_as_layers() -> None:
    """4 layers on 3 stages as 1, 2 and 1, not as 1, 1 and 2."""
    layout, recipe = Layout(pp=3), Recipe(microbatches=3, light_ends=True)
    assert worst(Case(layout, recipe)) <= 1e-9

    def layers(comm: Communicator, recipe: Recipe) -> int:
        parallel = spread(comm, Case(layout, recipe))
        return len(list(parallel.model.layers))  # type: ignore[arg-type]

    assert minidist.run(partial(layers, recipe=recipe), 3) == [1, 2, 1]
    assert minidist.run(partial(layers, recipe=replace(recipe, light_ends=False)), 3) == [1, 1, 2]


@pytest.mark.parametrize(
    ("layout", "change"),
    [
        (Layout(pp=5), {"microbatches": 5, "zero": 1}),
        (PP2, {"schedule": "interleaved", "chunks": 3, "microbatches": 4}),
        (Layout(pp=3), {"schedule": "zb-v", "microbatches": 6}),
        (Layout(pp=3, tp=2), {"schedule": "dualpipe-v", "microbatches": 6, "sp": True}),
    ],
    ids=str,
)
def test_the_ends_may_have_no_layer(layout: Layout, change: dict[str, Any]) -> None:
    """4 layers on 5 or 6 stages, of which the first is the embedding, and with 6 the last the
    head.
    """
    recipe = Recipe(light_ends=True, recompute="selective", **change)
    assert worst(Case(layout, recipe, replace(SMALL, tied=layout.pp == 3))) <= 1e-9


def test_a_rank_without_a_layer_knows_the_load_of_experts() -> None:
    config = replace(SMALL, experts=2, top_k=2, balance="bias", balance_rate=0.1)
    case = Case(Layout(pp=5), Recipe(light_ends=True, microbatches=5), config)

    def program(comm: Communicator) -> int:
        parallel = spread(comm, case)
        one_step(parallel, case, 0)
        assert parallel.load is not None and parallel.load.imbalance == 1  # each token has both
        return len(list(parallel.model.layers))  # type: ignore[arg-type]

    assert minidist.run(program, 5) == [0, 1, 1, 1, 1]


def test_a_rank_without_a_layer_multiplies_nothing_in_8_bits() -> None:
    case = Case(PP2, Recipe(fp8=True), dtype=torch.float32)
    more = replace(case, layout=Layout(pp=6), recipe=Recipe(fp8=True, light_ends=True))

    def loss(comm: Communicator, case: Case) -> float:
        return sum(comm.all_gather_object(one_step(spread(comm, case), case, 0)))

    (few, *_), (many, *_) = (
        minidist.run(partial(loss, case=each), each.layout.size) for each in (case, more)
    )
    assert many == pytest.approx(few, rel=1e-4)


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    (
        (Layout(pp=7), {}, "7 stages need at least 5 layers, but the model has 4: use fewer ranks"),
        (PP2, {"costs": (1.0,) * 4}, "light_ends says what the ends cost, and costs= what each"),
        (Layout(dp=2), {}, "light_ends is for a pipeline, and pp=1: leave it out"),
    ),
)
def test_ends_that_cannot_be_light(layout: Layout, change: dict[str, Any], message: str) -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(RecipeError, match=message):
            spread(comm, Case(layout, Recipe(light_ends=True), **change))

    minidist.run(program, layout.size)


def test_a_plan_of_ones_own() -> None:
    """Three stages on two ranks: rank 0 has the first and the last."""
    own = read_plan("0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1\n1F0 1F1 1B0 1B1")
    assert worst(Case(PP2, Recipe(schedule=own))) <= 1e-9


def test_what_each_rank_holds() -> None:
    """Of n trained elements about n/(tp pp), and of AdamW's state about 1/dp of that under ZeRO-1
    and 2 and 3.
    """

    def program(comm: Communicator, zero: int) -> tuple[int, int, int]:
        case = Case(EIGHT, Recipe(zero=zero, microbatches=2))
        mesh, model = (
            Mesh(comm, EIGHT),
            build(replace(SMALL, layers=8, tied=False, vocabulary=32), 0, torch.float64),
        )
        whole = sum(parameter.numel() for parameter in model.parameters())
        parallel = parallelize(model, mesh, case.recipe, cross_entropy_sum, lambda inputs: inputs)
        held = sum(p.numel() for p in parallel.model.parameters())
        return whole, held, sum(p.numel() for p in parallel.replica.trained if p.requires_grad)

    for zero in range(4):
        for whole, held, updated in minidist.run(partial(program, zero=zero), 8):
            # the norms are whole on tensor-parallel ranks
            assert whole / 4 <= held <= 1.2 * whole / 4
            assert (0.85 / 2 if zero else 0.85) <= updated / held <= (0.5 if zero else 1)


def test_every_axis_sends_what_it_should() -> None:
    """Two microbatches of [1, 8, 16] in float64, on a 2 x 2 x 2 mesh; no message goes where there
    is no axis.
    """

    def program(comm: Communicator) -> tuple[int, int, int]:
        mesh, config = Mesh(comm, EIGHT), replace(SMALL, dropout=0.0, tied=False, vocabulary=20)

        def carried(inputs: torch.Tensor) -> torch.Tensor:
            return torch.empty(*inputs.shape, 16, dtype=torch.float64, device="meta")

        def loss(logits: torch.Tensor, _: object) -> torch.Tensor:
            return logits.square().sum()

        parallel = parallelize(
            build(config, 0, torch.float64), mesh, Recipe(microbatches=2), loss, carried
        )
        tokens = [torch.zeros(1, 8, dtype=torch.int64)] * 2
        stream = parallel.replica.stream.comm  # type: ignore[union-attr]
        before = [(c.traffic.messages, c.traffic.bytes) for c in (mesh.pp, mesh.tp, stream)]
        parallel.step(tokens, tokens)
        after = [(c.traffic.messages, c.traffic.bytes) for c in (mesh.pp, mesh.tp, stream)]
        (pp, tp, dp), held = (
            [b[1] - a[1] for a, b in zip(before, after, strict=True)],
            parallel.model.parameters(),
        )
        activation = 8 * 16 * 8
        assert pp == 2 * activation, "one activation or gradient for each microbatch"
        # of attention and MLP, in forward and in backward, of this stage's two layers
        regions = 2 * 2 * 2
        assert tp == 2 * (regions + 1) * activation, (
            "an all-reduce of 2 ranks sends its bytes once; and the embedding or head"
        )
        assert dp == 8 * sum(p.numel() for p in held if p.requires_grad)
        return pp, tp, dp

    assert len(set(minidist.run(program, 8))) == 2, "the stages differ in the head, which is cut"


# ---------------------------------------------------------------- bugs that random layouts have found


@pytest.mark.parametrize(
    "layout",
    [pytest.param(PP2, marks=pytest.mark.soak), Layout(dp=2, pp=2)],
    ids=["pp=2", "dp=2, pp=2"],
)
@pytest.mark.parametrize("name", ["zb-h1", "zb1p", "zb-v", "dualpipe-v"])
def test_weight_gradients_that_are_put_off_outlive_recomputation(name: str, layout: Layout) -> None:
    """A checkpoint hands the saved weight back as another tensor: its gradient has to find the
    parameter.
    """
    for strategy in ("ddp", "naive"):
        recipe = Recipe(strategy=strategy, schedule=name, microbatches=3, recompute="full")  # type: ignore[arg-type]
        assert worst(Case(layout, recipe)) <= 1e-9


@pytest.mark.parametrize(
    "zero", (*(pytest.param(zero, marks=pytest.mark.soak) for zero in (0, 2)), 1, 3)
)
@pytest.mark.parametrize(
    "frozen", [("embedding",), ("embedding", "layers.0.", "layers.1.")], ids=["tied", "stage"]
)
def test_what_is_frozen_stays_so_on_every_stage(frozen: tuple[str, ...], zero: int) -> None:
    """A frozen embedding shared by two stages, which weight decay must not move; and a stage with
    nothing to train.
    """
    for config in (SMALL, replace(SMALL, tied=False)):
        assert (
            worst(
                Case(Layout(dp=2, pp=2), Recipe(zero=zero, microbatches=2), config, frozen=frozen)
            )
            <= 1e-9
        )


@pytest.mark.parametrize("name", ["zb-h1", "zb1p", "zb-v", "dualpipe-v"])
def test_shared_keys_and_values_where_weight_gradients_are_put_off(name: str) -> None:
    """One key-value head on two ranks: the hook that adds up its gradients is called without one
    first.
    """
    config = replace(SMALL, key_value_heads=1)
    assert worst(Case(Layout(pp=2, tp=2), Recipe(schedule=name, microbatches=2), config)) <= 1e-9


def test_buckets_are_as_small_as_asked_for() -> None:
    def program(comm: Communicator) -> int:
        replica = spread(comm, Case(DP2, Recipe(bucket_mib=4000 / MIB))).replica
        return len(replica.reducer.buckets)  # type: ignore[union-attr]

    assert min(minidist.run(program, 2)) > 3


# ---------------------------------------------------------------- no strategy can be replaced by a simpler one

LEAN = replace(SMALL, layers=8, tied=False, vocabulary=32, hidden=32, intermediate=64)


@pytest.mark.parametrize("zero", (0, 1, pytest.param(2, marks=pytest.mark.soak), 3))
def test_bytes_held_after_a_step_on_a_mesh(zero: int) -> None:
    """Of the n bytes that tensor parallelism and the pipeline leave a rank, ZeRO holds its part.
    DDP would fail it.
    """

    def program(comm: Communicator) -> dict[str, float]:
        bucket_mib = 4000 / MIB if zero < 3 else Recipe.bucket_mib
        case = Case(EIGHT, Recipe(zero=zero, microbatches=2, bucket_mib=bucket_mib), LEAN)
        parallel = spread(comm, case)
        optimizer = parallel.optimizer(
            torch.optim.AdamW, [{"params": list(parallel.model.parameters())}]
        )
        account = Account()
        account.watch(parallel.replica, optimizer)
        one_step(parallel, case, 0)
        optimizer.step()
        trained = sum(
            math.prod(p.shape) * 8 for p in parallel.model.parameters() if p.requires_grad
        )
        return {name: held / trained for name, held in account.sample().items()}

    part = 1 / 2
    expected = {  # of n
        "parameters": part if zero == 3 else 1,
        "gradients": {0: 1, 1: 1 + part, 2: part, 3: part}[zero],
        "optimizer": 2 * part if zero else 2,
    }
    for held in minidist.run(program, 8):
        # and a frozen matrix, a count of steps for each parameter
        for name, much in expected.items():
            assert much <= held[name] + 1e-9 and held[name] <= 1.1 * much, (name, held)


class Kept:
    """The bytes that autograd keeps for backward on this thread, each memory once, and the most
    there were of them.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self.users: Counter[tuple[int, int]] = Counter()
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> Held:
        """Return what autograd keeps in place of a tensor."""
        # of an operation's own output, its history would keep itself alive
        return Held(self, tensor.detach())

    def add(self, tensor: Tensor, more: int) -> None:
        """Take notice of one more user of a tensor's memory, or one less."""
        memory = tensor.untyped_storage()
        key = memory.data_ptr(), memory.nbytes()
        if memory.data_ptr() not in self.parameters:
            before = self.users[key]
            self.users[key] += more
            self.now += memory.nbytes() * (bool(self.users[key]) - bool(before))
            self.most = max(self.most, self.now)


class Held:
    """A tensor that is kept until this is dropped."""

    def __init__(self, kept: Kept, tensor: Tensor) -> None:
        self.kept, self.tensor = kept, tensor
        kept.add(tensor, 1)

    def __del__(self) -> None:
        self.kept.add(self.tensor, -1)


def saved_bytes(comm: Communicator, case: Case) -> int:
    """Return the bytes of activations that autograd keeps of a step at the most."""
    parallel = spread(comm, case)
    kept = Kept(parallel.model.parameters())
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda held: held.tensor):
        one_step(parallel, case, 0)
    assert kept.now == 0
    return kept.most


def test_sequence_parallelism_keeps_a_part_between_regions() -> None:
    """One microbatch of [B, T, D] on a 2 x 2 x 2 mesh; inside the regions both keep the same."""
    case = Case(EIGHT, Recipe(sp=True, microbatches=1), LEAN, batch=6)
    plain = replace(case, recipe=Recipe(microbatches=1))
    rows, time, hidden, layers = 3, LEAN.sequence, LEAN.hidden, LEAN.layers // 2
    # For each of attention and MLP: the residual stream, its normalised copy, a byte of mask, the
    # root of each token.
    between = layers * 2 * (8 + 8 + 1 + 8 / hidden) * rows * time * hidden
    for whole, part in zip(
        *(minidist.run(partial(saved_bytes, case=it), 8) for it in (plain, case)), strict=True
    ):
        assert whole - part >= between / 2


@pytest.mark.parametrize("layout", (DP2, PP2), ids=("dp=2", "pp=2"))
def test_evaluation_keeps_nothing_for_a_backward(layout: Layout) -> None:
    def program(comm: Communicator) -> int:
        case = Case(layout, Recipe(microbatches=2))
        parallel = spread(comm, case)
        kept = Kept(parallel.model.parameters())
        parts = tokens(case, 0).split(6)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda held: held.tensor):
            parallel.evaluate([t[:, :-1] for t in parts], [t[:, 1:] for t in parts])
        return kept.most

    assert minidist.run(program, 2) == [0, 0]


@pytest.mark.parametrize("name, most", [("1f1b", (2, 1)), ("gpipe", (6, 6)), ("naive", (1, 1))])
def test_a_schedule_on_a_mesh_keeps_as_many_microbatches_as_it_says(
    name: str, most: tuple[int, int]
) -> None:
    """Six microbatches, two stages: bytes as of so many steps of one microbatch, of which another
    is being computed.
    """
    layout = Layout(pp=2, tp=2)
    one = Case(layout, Recipe(microbatches=1), LEAN, batch=1)
    all_of_them = replace(one, recipe=Recipe(schedule=name, microbatches=6), batch=6)
    pairs = zip(
        *(minidist.run(partial(saved_bytes, case=case), 4) for case in (one, all_of_them)),
        strict=True,
    )
    for rank, (single, held) in enumerate(pairs):
        assert held / single == pytest.approx(most[layout.coordinate(rank)["pp"]], rel=0.1)


def test_every_rank_holds_its_own_layers_and_computes_with_them() -> None:
    """A pipeline that runs on its first rank has all parameters there, and no forward anywhere
    else.
    """

    def program(comm: Communicator) -> tuple[set[str], float]:
        case = Case(EIGHT, Recipe(microbatches=2), LEAN)
        parallel = spread(comm, case)
        one_step(parallel, case, 0)
        trained = [p for p in parallel.model.parameters() if p.requires_grad]
        moved = sum(p.grad is not None and bool(p.grad.any()) for p in trained) / len(trained)
        return {name for name, _ in parallel.model.named_parameters()}, moved

    names = {name for name, _ in build(LEAN, 0, torch.float64).named_parameters()}
    first = {
        name
        for name in names
        if name.startswith(("embedding", *(f"layers.{layer}." for layer in range(4))))
    }
    for rank, (held, moved) in enumerate(minidist.run(program, 8)):
        assert held == (names - first if EIGHT.coordinate(rank)["pp"] else first)
        assert moved == 1


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("layout", "recipe", "sentence"),
    [
        (
            PP2,
            Recipe(zero=2, schedule="zb-h1"),
            "ZeRO 2 does not go with zb-h1: use ZeRO 0 or 1, or the schedule gpipe",
        ),
        (
            PP2,
            Recipe(zero=3, schedule=plan("1f1b", 2, 2)),
            "ZeRO 3 does not go with a plan of one's own: use ZeRO 0 or 1",
        ),
        (
            DP2,
            Recipe(sp=True),
            "sequence parallelism shares tokens out among the ranks of tensor parallelism",
        ),
        (
            DP2,
            Recipe(recompute="every 0"),
            "there is no policy 'every 0' of recomputation: choose one of none, full",
        ),
        (
            DP2,
            Recipe(zero=1, strategy="server"),
            "ZeRO 1 shards what ddp reduces, not strategy 'server': use ddp",
        ),
        (
            Layout(pp=8),
            Recipe(microbatches=8),
            "8 stages need at least as many layers, but the model has 4",
        ),
        (
            PP2,
            Recipe(schedule="interleaved", chunks=2, microbatches=3),
            "takes microbatches in groups of 2",
        ),
        (
            Layout(pp=4),
            Recipe(schedule=plan("1f1b", 2, 2)),
            "the plan is for 2 ranks, but pp=4: use pp=2",
        ),
        (DP2, Recipe(schedule=plan("1f1b", 2, 2)), "the plan is for 2 ranks, but pp=1: use pp=2"),
        (
            DP2,
            Recipe(strategy="ring"),
            "there is no strategy 'ring': choose one of ddp, naive, server",
        ),  # type: ignore[arg-type]
        (
            DP2,
            Recipe(zero=1, hsdp=2),
            "hsdp=2 is for ZeRO 3, not for ZeRO 1: leave it out",
        ),
        (
            DP2,
            Recipe(zero=3, hsdp=3),
            "hsdp=3 does not divide the 2 ranks of the data axis: choose a divisor of 2",
        ),
        (PP2, Recipe(schedule=read_plan("0F0 0B0\n1F0")), "either 1B0 or both 1I0 and 1W0"),
        (PP2, Recipe(schedule=read_plan("0F0 0B0\n1B0 1F0")), "1B0"),
        (
            PP2,
            Recipe(schedule="1F1B"),
            "there is no schedule '1F1B': choose one of naive, gpipe, 1f1b",
        ),
        (
            DP2,
            Recipe(schedule="1F1B"),
            "there is no schedule '1F1B': choose one of naive, gpipe, 1f1b",
        ),
        (
            Layout(cp=2),
            Recipe(cp_order="zig"),
            "cp=2: there is no order 'zig' of tokens: choose one of zigzag, ",
        ),
        (
            Layout(cp=2),
            Recipe(cp_comm="p2p"),
            "cp=2: there is no way 'p2p' of context parallelism: choose one of ring",
        ),
        (
            Layout(cp=3),
            Recipe(cp_comm="ulysses"),
            "cp=3: Ulysses shares 4 heads, and 2 of keys and values, out among 3",
        ),
        (Layout(dp=2, ep=2), Recipe(zero=1), "ep=2: the model has no experts to share out: "),
        (DP2, Recipe(microbatches=-1), "microbatches=-1, but a step has at least 1"),
        (
            PP2,
            Recipe(schedule=plan("1f1b", 2, 2), microbatches=3),
            "microbatches=3, but the plan has 2 of its own",
        ),
        (
            DP2,
            Recipe(schedule="interleaved", chunks=2),
            "chunks=2 is for a pipeline that is interleaved: leave",
        ),
        (
            PP2,
            Recipe(schedule="interleaved", chunks=10**12, microbatches=2),
            "stages need at least as many layers, but the model has 4",
        ),
        (
            DP2,
            Recipe(strategy="naive", bucket_mib=1),
            "bucket_mib=1 is for ddp and ZeRO 1 and 2, not for the strategy 'naive'",
        ),
        (
            DP2,
            Recipe(zero=3, bucket_mib=1),
            "bucket_mib=1 is for ddp and ZeRO 1 and 2, not for ZeRO 3: leave it out",
        ),
        (
            DP2,
            Recipe(zero=2, allocate=lambda n, t: torch.empty(n, dtype=t)),
            "is for the shards of ZeRO 3, not for ZeRO 2: leave it out",
        ),
    ],
)
def test_mistakes_get_a_sentence_before_anything_is_sent(
    layout: Layout, recipe: Recipe, sentence: str
) -> None:
    def program(comm: Communicator) -> str:
        mesh = Mesh(comm, layout)
        sent = comm.traffic.messages
        with pytest.raises(RecipeError) as caught:
            parallelize(
                build(SMALL, 0, torch.float64),
                mesh,
                recipe,
                cross_entropy_sum,
                lambda inputs: inputs,
            )
        assert comm.traffic.messages == sent
        return str(caught.value)

    found = set(minidist.run(program, layout.size))
    assert len(found) == 1 and sentence in found.pop()


def test_a_model_without_a_list_of_layers_has_no_pipeline() -> None:
    """As those of Hugging Face, whose list is deeper inside."""

    def program(comm: Communicator) -> None:
        sentence = (
            "pp=2 cuts a model between the modules of its nn.ModuleList `layers`, and it has "
            "none: use pp=1"
        )
        with pytest.raises(RecipeError, match=sentence):
            parallelize(
                nn.Sequential(nn.Linear(2, 2)),
                Mesh(comm, PP2),
                Recipe(),
                cross_entropy_sum,
                lambda x: x,
            )

    minidist.run(program, 2)


def test_options_that_do_not_fit_the_model_are_found_before_anything_is_sent() -> None:
    def program(comm: Communicator) -> None:
        mesh, short = Mesh(comm, PP2), Recipe(microbatches=2, costs=[1.0] * 3)
        sent = comm.traffic.messages
        with pytest.raises(RecipeError, match="names 3 costs, but the model has 4 layers"):
            parallelize(
                build(SMALL, 0, torch.float64),
                mesh,
                short,
                cross_entropy_sum,
                lambda x: x,
            )
        with pytest.raises(
            RecipeError, match="recompute='full' is for a model with a list of `layers`"
        ):
            parallelize(
                nn.Linear(2, 2), Mesh(comm, DP2), Recipe(recompute="full"), cross_entropy_sum
            )
        assert comm.traffic.messages == sent

    minidist.run(program, 2)


@pytest.mark.parametrize("layout", [TP2, Layout(dp=2, tp=2)], ids=str)
def test_a_step_of_tensor_parallelism_on_meta(layout: Layout) -> None:
    """Shapes alone tell what would be sent."""

    def program(comm: Communicator) -> None:
        mesh, model = Mesh(comm, layout), GPT(SMALL, device="meta")
        loss = partial(
            vocabulary_parallel_cross_entropy_sum, comm=mesh.tp, vocabulary=SMALL.vocabulary
        )
        parallel = parallelize(model, mesh, Recipe(), loss)
        tokens = torch.zeros(2, 8, dtype=torch.long, device="meta")
        sent = mesh.tp.traffic.bytes
        assert parallel.step([tokens], [tokens]).shape == () and mesh.tp.traffic.bytes > sent
        assert all(parameter.grad is not None for parameter in model.parameters())

    minidist.run(program, layout.size)


def test_a_step_has_the_recipes_number_of_microbatches() -> None:
    def program(comm: Communicator) -> None:
        parallel = parallelize(
            build(SMALL, 0, torch.float64), Mesh(comm, DP2), Recipe(microbatches=2), lambda x, _: x
        )
        with pytest.raises(ValueError, match="1 inputs, but the recipe has microbatches=2"):
            parallel.step([torch.zeros(1, 8, dtype=torch.long)], [None])

    minidist.run(program, 2)


def test_heads_that_cannot_be_dealt_out_are_found_before_anything_is_sent() -> None:
    def program(comm: Communicator) -> None:
        mesh = Mesh(comm, Layout(tp=3))
        sent = comm.traffic.messages
        with pytest.raises(ValueError, match="4 heads cannot be dealt out to 3 ranks"):
            parallelize(build(SMALL, 0, torch.float64), mesh, Recipe(), cross_entropy_sum)
        assert comm.traffic.messages == sent

    minidist.run(program, 3)


def test_a_pipeline_has_to_know_what_travels() -> None:
    def program(comm: Communicator) -> None:
        mesh = Mesh(comm, PP2)
        with pytest.raises(RecipeError, match="pass carried=, see Pipeline"):
            parallelize(
                build(SMALL, 0, torch.float64), mesh, Recipe(microbatches=2), cross_entropy_sum
            )

    minidist.run(program, 2)


@pytest.mark.parametrize("zero", (1, 2, 3))
def test_stages_compute_with_slices_that_changed_outside_of_a_step(zero: int) -> None:
    case = Case(Layout(dp=2, pp=2), Recipe(zero=zero, microbatches=1), frozen=())
    t = tokens(case, 0)

    def program(comm: Communicator) -> float:
        parallel = spread(comm, case)
        with torch.no_grad():
            for piece in parallel.kept:
                piece.fill_(0.1)
        loss = parallel.evaluate(t[None, :, :-1], t[None, :, 1:])
        all_reduce(loss, parallel.mesh.pp)
        return float(loss)

    # equal weights give each token the same logit
    expected = math.log(case.config.vocabulary)
    assert minidist.run(program, 4) == pytest.approx([expected] * 4)
