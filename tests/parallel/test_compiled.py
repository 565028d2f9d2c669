"""Compiled blocks: the numbers of the serial run under every strategy, and what a compiler must leave alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from layouts import Case, worst

from minidist.mesh import Layout
from minidist.parallel import Recipe

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


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        (Layout(), {}),
        (Layout(dp=2), {"zero": 1, "microbatches": 2, "recompute": "full"}),
        (Layout(dp=2), {"zero": 3, "recompute": "selective"}),
        (Layout(dp=4), {"zero": 3, "shard_ranks": 2, "recompute": "every 2"}),
        (Layout(tp=2), {"sequence": True, "recompute": "selective"}),
        (Layout(pp=2), {"schedule": "1f1b", "microbatches": 3, "recompute": "full"}),
        (Layout(pp=2), {"schedule": "zb-h1", "microbatches": 4}),
        (Layout(pp=2, tp=2), {"schedule": "interleaved", "chunks": 2, "microbatches": 2, "sequence": True}),
    ],
    ids=lambda it: str(it).partition("\n")[0],
)
def test_the_numbers_of_the_serial_run(layout: Layout, options: dict[str, Any], graphs: Counted) -> None:
    """Microbatches are of two sizes, so all is compiled a second time, in the midst of a step."""
    assert worst(Case(layout, Recipe(**options, compile="counting"))) <= 1e-9
    assert sum(graphs) >= 40, "almost nothing was compiled"
