"""Layouts, models and recipes drawn at random train the model of the serial run.

A failing draw prints itself. It is run again by its number, also one of the soak:

    pytest -m "" "tests/parallel/test_random_layouts.py::test_a_random_layout[123]"
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise, permutations
from random import Random

import pytest
import torch
from layouts import Case, distances, spread, worst

import minidist
from minidist.full.comm import Communicator
from minidist.full.context.options import ORDERS, WAYS
from minidist.full.context.order import multiple
from minidist.full.ddp.buckets import MIB
from minidist.full.ddp.options import Strategy
from minidist.full.mesh import AXES, Layout
from minidist.full.model import GPTConfig
from minidist.full.model.config import BALANCES
from minidist.full.pipeline import NAMES, Plan, plan, read_plan
from minidist.full.pipeline.schedules import CHUNKED
from minidist.further import Recipe

DRAWS, SOAK = 8, 508
ROUNDED = 0.4  # of the gradients' norm
MOST_REFUSED = 60  # in a row, of one seed
COMPILED = 10  # one seed of so many, in the soak

# ---------------------------------------------------------------- what is drawn


def with_few_bits(case: Case, random: Random) -> Case:
    """Return the case with adapters, products in 8 bits or ZeRO++, in one of three."""
    recipe, dp = case.recipe, case.layout.dp * case.layout.cp
    if recipe.zero == 3 and random.random() < 0.4:
        nodes = random.choice([nodes for nodes in range(1, dp + 1) if dp % nodes == 0])
        recipe = replace(recipe, zeropp=True, node_ranks=dp // nodes)
    # Blocks of 256 numbers hold norms and matrices of models this small: 8 bits leave too little of
    # a frozen matrix.
    kind = "" if recipe.zeropp else random.choice(("", "", "", "lora", "qlora", "fp8"))
    if kind in ("lora", "qlora"):
        recipe = replace(recipe, lora=random.choice((1, 2, 5)), qlora=kind == "qlora")
    if kind == "fp8" or (kind == "lora" and random.random() < 0.2):
        case = replace(case, dtype=random.choice((torch.float32, torch.bfloat16)))
        recipe = replace(recipe, fp8=True)
    return replace(case, recipe=recipe)


def with_light_ends(case: Case, random: Random) -> Case:
    """Return the case with ends that count as layers, in half of the pipelines: they may have none."""
    if case.layout.pp == 1 or case.costs or random.random() < 0.5:
        return case
    layers = max(1, case.config.layers - random.choice((0, 1, 2)))
    recipe = replace(case.recipe, light_ends=True)
    return replace(case, recipe=recipe, config=replace(case.config, layers=layers))


def layouts(ranks: int) -> list[Layout]:
    """Return all of so many ranks, without experts."""
    sizes = range(1, ranks + 1)
    shapes = itertools.product(sizes, repeat=4)
    return [Layout(dp, pp, cp, tp) for dp, pp, cp, tp in shapes if dp * pp * cp * tp == ranks]


def with_experts(case: Case, random: Random) -> Case:
    """Return the case with experts, in one of three; those are shared out mostly."""
    if random.random() < 0.6 or case.recipe.fp8:  # with 8 bits, another file has experts
        return case
    data, tp = case.layout.dp * case.layout.cp, case.layout.tp
    ep = random.choice([ep for ep in range(1, data + 1) if data % ep == 0])
    config = replace(
        case.config,
        experts=(experts := max(2, ep * tp + random.choice((-1, 0, 0, 1, 2, 3)))),
        top_k=random.randint(2, min(3, experts)),
        shared_experts=random.choice((0, 0, 1, 2)),
        capacity=random.choice((0.0, 0.0, 0.7, 1.3)),
        scores=random.choice(("softmax", "sigmoid")),
        raw_weights=random.random() < 0.3,
        balance=random.choice(BALANCES),
        z_loss=random.choice((0.0, 0.01)),
    )
    if config.balance != "none":
        config = replace(config, balance_rate=random.choice((0.001, 0.1)))
    recipe = case.recipe
    # in few bits, a token may go to another expert
    dtype = case.dtype if recipe.lora else torch.float64
    frozen = tuple(name for name in case.frozen if ".mlp." not in name)
    more = f"layers.{random.randrange(config.layers)}.mlp.routed.{random.choice(('router', 'experts.up', 'experts'))}"
    return replace(
        case,
        layout=replace(case.layout, ep=ep),
        recipe=recipe,
        config=config,
        dtype=dtype,
        frozen=(*frozen, more),
    )


def draws(seed: int) -> Iterator[Case]:
    """Yield cases of which some are refused."""
    random, more, experts = Random(seed), Random(f"few bits {seed}"), Random(f"experts {seed}")
    ends = Random(f"light ends {seed}")
    while True:
        case = with_light_ends(draw(random), ends)
        yield with_experts(with_few_bits(case, more), experts)


def draw(random: Random) -> Case:
    """Return a case that may be refused: about one in three."""
    layout = random.choice(layouts(random.choice((1, 2, 3, 4, 6, 8))))
    recipe, stages = draw_recipe(random, layout)
    config = draw_model(random, layout, stages, recipe)
    orders = [order for order in permutations(AXES) if order.index("dp") < order.index("cp")]
    return Case(
        replace(layout, order=random.choice(orders)),
        recipe,
        config,
        batch=random.randint(1, 12),
        dtype=random.choice((torch.float64,) * 5 + (torch.float32, torch.bfloat16, torch.float16)),
        frozen=draw_frozen(random, config),
        costs=random.choice((None, tuple(random.uniform(0.1, 3) for _ in range(config.layers)))),
    )


def draw_recipe(random: Random, layout: Layout) -> tuple[Recipe, int]:
    """Return a recipe, and how many stages its pipeline has."""
    microbatches = random.randint(1, 5)
    schedule: str | Plan = random.choice(NAMES)
    chunks = random.choice((1, 2, 3)) if schedule in CHUNKED and layout.pp > 1 else 1
    if schedule in CHUNKED and random.random() < 0.8:
        microbatches = layout.pp * random.choice((1, 2))
    if layout.pp > 1 and random.random() < 0.3:
        schedule, chunks = draw_plan(random, layout.pp, microbatches), 1
    stages = chunks * layout.pp * (2 if schedule in ("zb-v", "dualpipe-v") else 1)
    zero = random.choice((0, 1, 2, 3))
    hybrid = zero == 3 and random.random() < 0.5
    strategy: Strategy = random.choice(("ddp", "ddp", "naive", "server")) if zero == 0 else "ddp"
    recipe = Recipe(
        strategy=strategy,
        zero=zero,
        hsdp=random.choice((1, 2, layout.dp * layout.cp)) if hybrid else 0,
        bucket_mib=random.choice((1, 3000, 25 * MIB)) / MIB
        if strategy == "ddp" and zero < 3
        else Recipe.bucket_mib,
        sp=random.random() < (0.5 if layout.tp > 1 else 0.05),
        schedule=schedule,
        chunks=chunks,
        microbatches=microbatches,
        recompute=random.choice(
            ("none", "none", "full", "selective", "sqrt", "every 2", "every 3")
        ),
        cp_comm=random.choice(WAYS),
        cp_order=random.choice(ORDERS),
    )
    return recipe, schedule.stages if isinstance(schedule, Plan) else stages


def draw_model(random: Random, layout: Layout, stages: int, recipe: Recipe) -> GPTConfig:
    """Return a model: layers enough for the pipeline nearly always, heads that tp divides
    mostly.
    """
    heads = random.choice((1, 2, 3, 4)) if layout.tp == 1 else layout.tp * random.choice((1, 1, 2))
    if recipe.cp_comm == "ulysses" and random.random() < 0.8:
        heads *= layout.cp
    heads = heads + 1 if random.random() < 0.05 else heads
    wanted = stages if layout.pp > 1 else 1
    least = multiple(recipe.cp_order, layout.cp) * (layout.tp if recipe.sp else 1)
    return GPTConfig(
        vocabulary=random.randint(layout.tp, 40),
        layers=max(1, wanted + random.choice((-1, 0, 0, 1, 1, 2, 3))),
        hidden=heads * random.choice((2, 4)),
        heads=heads,
        key_value_heads=random.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        intermediate=random.randint(max(2, layout.tp), 30),
        sequence=random.randint(1, 3) * least if least > 1 else random.randint(2, 8),
        dropout=random.choice((0.0, 0.1, 0.4)),
        tied=random.random() < 0.5,
    )


def draw_frozen(random: Random, config: GPTConfig) -> tuple[str, ...]:
    """Return one matrix of a layer, and sometimes the embedding, all norms, or all that comes
    before some layer.
    """
    layer = random.randrange(config.layers)
    matrix = f"layers.{layer}.{random.choice(('mlp.up', 'mlp.down', 'attention.key', 'attention.output'))}.weight"
    norms = tuple(f"layers.{number}.mlp_norm" for number in range(config.layers))
    below = ("embedding", *(f"layers.{number}." for number in range(layer)))
    return matrix, *random.choice(((), (), (), ("embedding",), norms, below))


def draw_plan(random: Random, ranks: int, microbatches: int) -> Plan:
    """Return a plan of one's own as it is read from text: a known schedule, or actions in any order
    that can be.
    """
    if random.random() < 0.3:
        return read_plan(
            plan(
                random.choice(("naive", "gpipe", "1f1b", "zb-h1", "zb-v")), ranks, microbatches
            ).text()
        )
    holders = [*range(ranks), *(random.randrange(ranks) for _ in range(random.randint(0, 2)))]
    random.shuffle(holders)
    # of each microbatch and stage what has to come in this order, beginning with the first forward
    chains = []
    for microbatch in range(microbatches):
        way = [(stage, "F") for stage in range(len(holders))]
        halves = [(stage, random.random() < 0.5) for stage in reversed(range(len(holders)))]
        way += [(stage, "I" if half else "B") for stage, half in halves]
        chains.append([f"{stage}{kind}{microbatch}" for stage, kind in way])
        for stage, half in halves:
            if half:
                chains.append([f"{stage}I{microbatch}", f"{stage}W{microbatch}"])
    before = {later: earlier for chain in chains for earlier, later in pairwise(chain)}
    left = sorted({word for chain in chains for word in chain})
    rows: list[list[str]] = [[] for _ in range(ranks)]
    while left:
        word = random.choice([word for word in left if before.get(word) not in left])
        left.remove(word)
        rows[holders[int(word[0])]].append(word)
    return read_plan("\n".join(" ".join(row) for row in rows))


# ---------------------------------------------------------------- what is proved


def refusal(case: Case) -> str:
    """Return the sentence by which every rank refuses the case before it trains, or ""."""

    def program(comm: Communicator) -> str:
        try:
            spread(comm, case)
        except ValueError as error:
            return str(error)
        return ""

    sentences = set(minidist.run(program, case.layout.size))
    assert len({sentence == "" for sentence in sentences}) == 1, (
        f"some ranks refuse, and some do not: {sentences}"
    )
    return min(sentences)


def prove(case: Case) -> None:
    """Train, and compare with the serial run."""
    # gradients in 4 bits: the mean where a sum was meant would be off by a half at least
    if case.recipe.zeropp:
        assert distances(case)[0] <= ROUNDED
    elif case.dtype == torch.float64:
        assert worst(case) <= 1e-9
    else:
        ours, serial = distances(case)
        # roundings of an adapter's few numbers vary more
        assert ours <= (3 if case.recipe.lora else 2) * serial


def printed(case: Case) -> str:
    """Return the case as text, a plan as `read_plan` takes it."""
    own = case.recipe.schedule
    return str(
        replace(
            case, recipe=replace(case.recipe, schedule=own.text() if isinstance(own, Plan) else own)
        )
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.soak] * (seed >= DRAWS))
        for seed in range(DRAWS + SOAK)
    ],
)
def test_a_random_layout(seed: int) -> None:
    for case in islice(draws(seed), MOST_REFUSED):
        if seed >= DRAWS and seed % COMPILED == 0:
            torch._dynamo.reset()  # of one function, only eight forms are kept
            case = replace(case, recipe=replace(case.recipe, compile="aot_eager"))
        try:
            sentence = refusal(case)
            if not sentence:
                prove(case)
                return
            assert " " in sentence and (": " in sentence or "but" in sentence), (
                f"no sentence with a fix: {sentence!r}"
            )
        except BaseException as error:
            error.add_note(f"seed {seed}: {printed(case)}")
            raise
    pytest.fail(f"seed {seed}: {MOST_REFUSED} draws in a row are refused")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ranks", (1, 2, 3, 4, pytest.param(8, marks=pytest.mark.soak)))
def test_every_layout(ranks: int) -> None:
    """Once each, ZeRO 0 and 1 in turn."""
    for number, layout in enumerate(layouts(ranks)):
        heads, shared = (6, 3) if layout.tp == 3 else (8, 2)
        config = GPTConfig(
            vocabulary=19, layers=max(2, layout.pp), hidden=2 * heads, heads=heads, key_value_heads=shared,
            intermediate=13, sequence=4 * layout.cp, dropout=0.1, tied=number % 3 > 0,
        )  # fmt: skip
        recipe = Recipe(zero=number % 2, microbatches=2, cp_order=ORDERS[number % 3])
        assert worst(Case(layout, recipe, config, batch=5, steps=2)) <= 1e-9, layout
