"""Compiled blocks: the numbers of the serial run under every strategy, and what a compiler must
leave alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from layouts import SMALL, Case, distances, spread, worst

import minidist
from minidist.full import RecipeError
from minidist.full.apply import check_recipe
from minidist.full.layers.compiled import compile_blocks, compile_fault
from minidist.full.mesh import Layout
from minidist.full.model import GPT, Where
from minidist.full.strategy import Facts
from minidist.further import ORDER, Recipe

Counted = list[int]  # operations of each graph


@pytest.fixture
def graphs() -> Iterator[Counted]:
    """The graphs that the backend "counting" is given; it runs them by `aot_eager`."""
    found: Counted = []
    torch._dynamo.reset()

    def counting(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        found.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)  # type: ignore[no-any-return]

    torch._dynamo.register_backend(counting, name="counting")
    yield found
    del torch._dynamo.backends.registry._COMPILER_FNS["counting"]
    torch._dynamo.reset()


# as recipes, so that those of the soak are known to be some whenever this file is read
CASES: list[tuple[Layout, Recipe]] = [
    (Layout(), Recipe()),
    (Layout(dp=2), Recipe(zero=3, recompute="selective")),
    (Layout(pp=2), Recipe(schedule="1f1b", microbatches=3, recompute="full")),
    # of the soak
    (Layout(cp=2), Recipe(cp_comm="ulysses", recompute="selective")),
    (Layout(tp=2), Recipe(sp=True)),
    (Layout(dp=2), Recipe(microbatches=2, recompute="sqrt")),
    (Layout(dp=2), Recipe(zero=1, microbatches=2, recompute="full")),
    (Layout(dp=2), Recipe(zero=2)),
    (Layout(dp=4), Recipe(zero=3, hsdp=2, recompute="every 2")),
    (Layout(tp=2), Recipe(recompute="selective")),
    (Layout(pp=2), Recipe(schedule="zb-h1", microbatches=4)),
    (Layout(pp=2, tp=2), Recipe(schedule="interleaved", chunks=2, microbatches=2, sp=True)),
    (Layout(dp=2, pp=2), Recipe(schedule="zb-v", microbatches=4, zero=1)),
    (Layout(cp=2), Recipe(recompute="full", zero=3)),
    (Layout(cp=2, pp=2), Recipe(cp_comm="all_gather", schedule="zb-h1", microbatches=2)),
]


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        pytest.param(*case, marks=[pytest.mark.soak] * (number >= 3))
        for number, case in enumerate(CASES)
    ],
    ids=[str(number) for number in range(len(CASES))],
)
def test_the_numbers_of_the_serial_run(layout: Layout, recipe: Recipe, graphs: Counted) -> None:
    """Microbatches are of two sizes, so all is compiled a second time, in the midst of a step."""
    config = replace(
        SMALL, layers=4 if layout.pp > 1 else 2, dropout=0.1 if layout.size == 1 else 0
    )
    compiled = replace(recipe, compile="counting")
    assert worst(Case(layout, compiled, config)) <= 1e-9
    whole = layout.tp == 1 and not recipe.schedule.startswith("zb")
    assert max(graphs) >= (20 if whole else 5), "nothing was compiled, or in small pieces"


@pytest.mark.soak
def test_16_bits_are_as_near_to_float64_as_in_the_serial_run(graphs: Counted) -> None:
    config, recipe = replace(SMALL, layers=2, dropout=0.0), Recipe(zero=1, compile="counting")
    ours, serial = distances(Case(Layout(dp=2), recipe, config, dtype=torch.bfloat16))
    assert 0 < ours <= 2 * serial and graphs


@pytest.mark.soak
def test_a_second_shape_compiles_once_more(graphs: Counted) -> None:
    model = GPT(replace(SMALL, dropout=0.0), torch.Generator().manual_seed(0))
    plain = GPT(replace(SMALL, dropout=0.0), torch.Generator().manual_seed(0))
    compile_blocks(model.layers, "counting")
    counts = []
    for rows, time in ((2, 8), (3, 8), (5, 8), (7, 8)):
        tokens = torch.randint(19, (rows, time))
        assert torch.allclose(model(tokens, Where()), plain(tokens, Where()), atol=1e-5)
        counts.append(len(graphs))
    assert counts[0] <= 3, "layers of one shape do not share what was compiled for the first"
    assert counts == [counts[0], 2 * counts[0], 2 * counts[0], 2 * counts[0]]


def test_only_the_blocks_are_compiled_and_unwrapping_undoes_it(graphs: Counted) -> None:
    parallel = minidist.run(
        lambda comm: spread(comm, Case(Layout(), Recipe(compile="counting"))), 1
    )[0]
    layers = parallel.model.layers
    assert all("forward" in vars(layer) for layer in layers) and "forward" not in vars(
        parallel.model
    )
    parallel.unwrap()
    parallel.model(torch.zeros(1, 4, dtype=torch.long), Where())
    assert not graphs and not any("forward" in vars(layer) for layer in layers)


def test_with_the_machines_own_compiler() -> None:
    if fault := compile_fault(True):
        pytest.skip(fault)
    torch._dynamo.reset()
    config = replace(SMALL, layers=1, dropout=0.0)
    assert (
        worst(Case(Layout(dp=2), Recipe(zero=3, compile=True), config, batch=4, frozen=())) <= 1e-9
    )


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        RecipeError, match=r"compile=True is for a model with a list of `layers`: leave it out"
    ):
        check_recipe(Recipe(compile=True), Layout(), Facts(layers=0), ORDER)
    with pytest.raises(
        RecipeError, match=r"there is no compiler 'gcc': use one of .*aot_eager.*inductor"
    ):
        check_recipe(Recipe(compile="gcc"), Layout(), Facts(layers=1), ORDER)

    def get_cpp_compiler() -> str:
        raise RuntimeError

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", get_cpp_compiler)
    with pytest.raises(
        RecipeError,
        match=r"needs a C\+\+ compiler such as g\+\+, and there is none: install it, or leave",
    ):
        check_recipe(Recipe(compile=True), Layout(), Facts(layers=1), ORDER)
