"""`torch.autocast` as a precision: products in 16 bits, all that is kept in 32, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import short_text, train_on

import minidist
from minidist.full.comm import Communicator
from minidist.full.mesh import Layout, Mesh
from minidist.full.model import GPT, GPTConfig, cross_entropy_sum
from minidist.full.recipe import RecipeError
from minidist.further import Recipe, parallelize

SIZES = GPTConfig(vocabulary=32, layers=2, hidden=32, heads=4, intermediate=48, sequence=8)
TOKENS = torch.arange(32).view(4, 8)
NUMBERS = sum(parameter.numel() for parameter in GPT(SIZES, device="meta").parameters())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_text(tmp_path_factory.mktemp("text"), 580)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, "--dp 2 --zero 1 --tied"),
        (2, "--dp 2 --zero 2 --accumulate 2"),
        (2, "--dp 2 --zero 3 --recompute full"),
        (4, "--dp 2 --pp 2 --zero 3 --tied"),
        (4, "--dp 2 --tp 2 --zero 3 --eval-every 2"),
        pytest.param(1, "--compile", marks=pytest.mark.soak),
        (2, "--pp 2 --schedule zb-h1"),
        (4, "--pp 2 --tp 2 --sp --recompute full"),
        (2, "--cp 2 --recompute selective"),
        (2, "--ep 2 --experts 4 --pp 1"),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.soak)])
def test_a_run_is_as_close_to_the_exact_one_as_on_one_rank(
    ranks: int, words: str, dtype: str, text: Path
) -> None:
    asked = f"--precision autocast-{dtype} --steps 3 --lr 0.01 --layers 4 --heads 4 --text {text}"
    assert train_on(ranks, asked, words, "--verify") == 0


def gradients(
    comm: Communicator, recipe: Recipe, layout: Layout
) -> tuple[list[Tensor], set[Any], int]:
    """Return the gradients of a step, the dtypes of products, and the bytes that were sent."""
    model = GPT(SIZES, torch.Generator().manual_seed(1))
    found: set[Any] = set()

    def note(module: nn.Module, x: Any, y: Tensor) -> None:
        found.add(y.dtype)
        if y.dtype == torch.bfloat16:  # torch's cache would keep copies that nobody needs
            assert not torch.is_autocast_cache_enabled()

    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(note)
    parallel = parallelize(
        model,
        Mesh(comm, layout),
        recipe,
        lambda logits, y: cross_entropy_sum(logits, y) / 32,
        lambda x: torch.empty(*x.shape, SIZES.hidden, device="meta"),
    )
    count = parallel.recipe.microbatches
    parts = list(TOKENS.chunk(count * layout.dp))[parallel.mesh.dp.rank :: layout.dp]
    sent = comm.traffic.bytes
    parallel.step(parts, parts)
    assert not torch.is_autocast_enabled("cpu"), "it ends with the forward"
    grads = [p.grad for p in parallel.model.parameters() if p.grad is not None]
    assert all(p.dtype == torch.float32 for p in (*parallel.model.parameters(), *grads))
    return grads, found, comm.traffic.bytes - sent


HALF = Recipe(autocast="bfloat16")


def test_products_have_16_bits_and_all_that_is_kept_has_32() -> None:
    """Fails if autocast is off, and if the whole model is narrowed: gradients would have 2 bytes."""
    for _, dtypes, sent in minidist.run(lambda comm: gradients(comm, HALF, Layout(dp=2)), 2):
        assert dtypes == {torch.bfloat16}
        assert sent == 4 * NUMBERS
    ((_, without, _),) = minidist.run(lambda comm: gradients(comm, Recipe(), Layout()), 1)
    assert without == {torch.float32}


def test_what_is_computed_again_is_the_same_bits() -> None:
    (kept, again) = (
        minidist.run(lambda comm, r=r: gradients(comm, r, Layout()), 1)[0][0]
        for r in (HALF, Recipe(autocast="bfloat16", recompute="full"))
    )
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_stages_hand_on_the_residual_stream_in_32_bits() -> None:
    """Two microbatches go down and two gradients come up: 2 rows of 8 tokens each, 4 bytes."""
    recipe = Recipe(autocast="bfloat16", microbatches=2, schedule="1f1b")
    ranks = minidist.run(lambda comm: gradients(comm, recipe, Layout(pp=2)), 2)
    for _, dtypes, sent in ranks:
        assert dtypes == {torch.bfloat16} and sent == 2 * 2 * 8 * SIZES.hidden * 4


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Recipe(autocast="int8"), "is no dtype of 16 bits: use bfloat16 or float16"),
        (Recipe(autocast="float16", fp8=True), r"8 bits \(fp8\) choose for themselves"),
    ],
)
def test_what_does_not_fit_is_said(recipe: Recipe, words: str) -> None:
    def program(comm: Communicator) -> None:
        mesh = Mesh(comm, Layout(dp=2))
        with pytest.raises(RecipeError, match=words):
            parallelize(GPT(SIZES, device="meta"), mesh, recipe, cross_entropy_sum)

    minidist.run(program, 2)


def test_a_device_without_autocast_is_refused() -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(RecipeError, match="meta is none: use the CPU or a GPU"):
            parallelize(GPT(SIZES, device="meta"), Mesh(comm, Layout()), HALF, cross_entropy_sum)

    minidist.run(program, 1)


def test_an_error_in_forward_leaves_autocast() -> None:
    def program(comm: Communicator) -> None:
        model = GPT(SIZES, torch.Generator().manual_seed(1))
        parallel = parallelize(model, Mesh(comm, Layout()), HALF, cross_entropy_sum)
        with pytest.raises(IndexError):
            parallel.step([TOKENS + 100], [TOKENS])
        assert not torch.is_autocast_enabled("cpu")

    minidist.run(program, 1)
