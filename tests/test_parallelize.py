"""Every strategy together: layouts of up to 8 ranks train the model of the serial run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from layouts import SMALL, Case, build, worst

import minidist
from minidist.comm import Communicator
from minidist.mesh import Layout, Mesh
from minidist.model import cross_entropy_sum
from minidist.parallel import Recipe, RecipeError, parallelize
from minidist.parallel.pipeline import plan, read_plan

TP2, PP2, DP2 = Layout(tp=2), Layout(pp=2), Layout(dp=2)
EIGHT = Layout(dp=2, pp=2, tp=2)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "layout", [TP2, PP2, Layout(dp=2, tp=2), Layout(pp=2, tp=2), Layout(dp=2, pp=2), EIGHT], ids=str
)
def test_parity_on_every_layout(layout: Layout, zero: int) -> None:
    assert worst(Case(layout, Recipe(zero=zero, microbatches=4))) <= 1e-9


@pytest.mark.parametrize(
    "layout", [Layout(dp=3), Layout(dp=3, pp=2), Layout(pp=4, tp=2), Layout(dp=4, tp=2), Layout(pp=3)], ids=str
)
def test_parity_where_sizes_do_not_divide(layout: Layout) -> None:
    assert worst(Case(layout, Recipe(zero=1, microbatches=3, recompute="every 3"))) <= 1e-9


@pytest.mark.parametrize(
    "name, chunks", [("naive", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 1), ("dualpipe-v", 1)]
)
def test_every_schedule_under_tensor_and_sequence_parallelism(name: str, chunks: int) -> None:
    """Untied, as the deferred products of cut layers matter most where the head has its own."""
    recipe = Recipe(schedule=name, chunks=chunks, microbatches=4, sequence=True, zero=1, recompute="selective")
    assert worst(Case(EIGHT, recipe, replace(SMALL, tied=False))) <= 1e-9


def test_a_plan_of_ones_own() -> None:
    """Three stages on two ranks: rank 0 has the first and the last."""
    own = read_plan("0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1\n1F0 1F1 1B0 1B1")
    assert worst(Case(PP2, Recipe(schedule=own))) <= 1e-9


def test_what_each_rank_holds() -> None:
    """Of n trained elements about n/(tp pp), and of AdamW's state about 1/dp of that under ZeRO-1 and 2 and 3."""

    def program(comm: Communicator, zero: int) -> tuple[int, int, int]:
        case = Case(EIGHT, Recipe(zero=zero, microbatches=2))
        mesh, model = Mesh(comm, EIGHT), build(replace(SMALL, layers=8, tied=False, vocabulary=32), 0, torch.float64)
        whole = sum(parameter.numel() for parameter in model.parameters())
        parallel = parallelize(model, mesh, case.recipe, cross_entropy_sum, lambda inputs: inputs)
        held = sum(p.numel() for p in parallel.model.parameters())
        return whole, held, sum(p.numel() for p in parallel.trained if p.requires_grad)

    for zero in range(4):
        for whole, held, updated in minidist.run(partial(program, zero=zero), 8):
            assert whole / 4 <= held <= 1.2 * whole / 4  # the norms are whole on tensor-parallel ranks
            assert (0.85 / 2 if zero else 0.85) <= updated / held <= (0.5 if zero else 1)


def test_every_axis_sends_what_it_should() -> None:
    """Two microbatches of [1, 8, 16] in float64, on a 2 x 2 x 2 mesh; no message goes where there is no axis."""

    def program(comm: Communicator) -> tuple[int, int, int]:
        mesh, config = Mesh(comm, EIGHT), replace(SMALL, dropout=0.0, tied=False, vocabulary=20)

        def carried(inputs: torch.Tensor) -> torch.Tensor:
            return torch.empty(*inputs.shape, 16, dtype=torch.float64, device="meta")

        def loss(logits: torch.Tensor, _: object) -> torch.Tensor:
            return logits.square().sum()

        parallel = parallelize(build(config, 0, torch.float64), mesh, Recipe(microbatches=2), loss, carried)
        tokens = [torch.zeros(1, 8, dtype=torch.int64)] * 2
        stream = parallel.replica.stream.comm  # type: ignore[union-attr]
        before = [(c.traffic.messages_sent, c.traffic.bytes_sent) for c in (mesh.pp, mesh.tp, stream)]
        parallel.step(tokens, tokens)
        after = [(c.traffic.messages_sent, c.traffic.bytes_sent) for c in (mesh.pp, mesh.tp, stream)]
        (pp, tp, dp), held = [b[1] - a[1] for a, b in zip(before, after, strict=True)], parallel.model.parameters()
        activation = 8 * 16 * 8
        assert pp == 2 * activation, "one activation or gradient for each microbatch"
        regions = 2 * 2 * 2  # of attention and MLP, in forward and in backward, of this stage's two layers
        assert tp == 2 * (regions + 1) * activation, (
            "an all-reduce of 2 ranks sends its bytes once; and the embedding or head"
        )
        assert dp == 8 * sum(p.numel() for p in held if p.requires_grad)
        return pp, tp, dp

    assert len(set(minidist.run(program, 8))) == 2, "the stages differ in the head, which is cut"


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
        (DP2, Recipe(sequence=True), "sequence parallelism shares tokens out among the ranks of tensor parallelism"),
        (DP2, Recipe(zero=1, strategy="server"), "ZeRO 1 shards what ddp reduces, not strategy 'server': use ddp"),
        (Layout(pp=8), Recipe(microbatches=8), "8 stages need at least as many layers, but the model has 4"),
        (Layout(pp=4), Recipe(schedule="interleaved", chunks=2, microbatches=6), "takes microbatches in groups of 4"),
        (Layout(pp=4), Recipe(schedule=plan("1f1b", 2, 2)), "the plan is for 2 ranks, but pp=4: use pp=2"),
        (PP2, Recipe(schedule=read_plan("0F0 0B0\n1F0")), "backward"),
        (PP2, Recipe(schedule=read_plan("0F0 0B0\n1B0 1F0")), "1B0"),
        (PP2, Recipe(schedule="1F1B"), "there is no schedule '1F1B': choose one of naive, gpipe, 1f1b"),
    ],
)
def test_mistakes_get_a_sentence_before_anything_is_sent(layout: Layout, recipe: Recipe, sentence: str) -> None:
    def program(comm: Communicator) -> str:
        mesh = Mesh(comm, layout)
        sent = comm.traffic.messages_sent
        with pytest.raises(RecipeError) as caught:
            parallelize(build(SMALL, 0, torch.float64), mesh, recipe, cross_entropy_sum, lambda inputs: inputs)
        assert comm.traffic.messages_sent == sent
        return str(caught.value)

    found = set(minidist.run(program, layout.size))
    assert len(found) == 1 and sentence in found.pop()
