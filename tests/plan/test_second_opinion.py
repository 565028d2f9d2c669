"""What the planner predicts beside the real program: on `meta` tensors, bytes are counted and a
virtual clock runs.

Both count products at one speed, bytes at one bandwidth, what hides behind what, and the schedule;
latencies, element-wise work and everything that is fitted are left out of both.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import permutations

import pytest
import torch

import minidist
from minidist.full.comm import Communicator
from minidist.full.comm.threads_wire.cluster import Cluster, Link
from minidist.full.context.flash import operations
from minidist.full.context.order import Sight, positions
from minidist.full.memory.account import Account
from minidist.full.mesh import AXES, Layout, Mesh
from minidist.full.meta import Computing
from minidist.full.model import GPT, GPTConfig, Where
from minidist.full.model.config import attended_pairs
from minidist.full.model.seen import among, first_seen
from minidist.full.placement import copies_of
from minidist.full.precision.masters import MasterWeights
from minidist.full.trainer.loop import carried_of, loss_of
from minidist.further import Recipe, parallelize
from minidist.plan.compute.attention import attention
from minidist.plan.device import Constants, Device, Machine
from minidist.plan.memory import bytes_held
from minidist.plan.model import Model
from minidist.plan.run import Setup, Software
from minidist.plan.step import step
from minidist.plan.traffic import bytes_sent, tokens_seen

NODE, INSIDE, ACROSS, FLOPS = 4, 4e9, 2e9, 1e12
SIZES = GPTConfig(
    vocabulary=1024,
    layers=8,
    hidden=256,
    heads=8,
    key_value_heads=4,
    intermediate=512,
    sequence=128,
)
MODEL = Model(8, 256, 8, 1024, kv=4, ffn=512)
COUNTED = Constants.table().but(
    launch=0.0, tree=0.0, hop=0.0, near_hop=0.0, host=0.0, synchronize=0.0, unaligned=1.0, share_across=1.0, stolen=0.0,
    streamed=1.0, host_link=math.inf, megatron_core=1.0, backward_attention=1.0, narrow_heads=0.0,
)  # fmt: skip
SOFTWARE = Software(
    "counted",
    "megatron_core",
    "unfused",
    overlap=True,
    early_stop=True,
    sends_wait=False,
    gradients=2,
)
DEVICE = Device("counted", FLOPS, FLOPS, 1.0, 1e12, math.inf, 1, INSIDE, 1.0, 0.0, "none")


def setup(batch: int = 2, **how: object) -> Setup:
    """Return a run of the small model on as many ranks as its axes have; `batch` sequences a
    microbatch.
    """
    start = Setup(
        MODEL, Machine("counted", DEVICE, 8, NODE, NODE * ACROSS, 0.0), 128, 0, batch, order=AXES
    )
    run = replace(start, software=SOFTWARE, known=COUNTED, **how)  # type: ignore[arg-type]
    if run.cp > 1:  # attention across ranks leaves out what is masked
        run = replace(run, software=replace(SOFTWARE, kernel="flash"))
    ranks = run.dp * run.cp * run.tp * run.pp
    return replace(run, machine=replace(run.machine, gpus=ranks))


def really(run: Setup, microbatches: int) -> tuple[dict[str, int], float]:
    """Take a step of the real program on `meta`: return the bytes that all ranks sent by axis, and
    its seconds. ZeRO 3 takes one before, in which it learns in which order the layers come.
    """
    layout = Layout(run.dp, run.pp, run.cp, run.tp)
    recipe = Recipe(
        zero=run.zero,
        hsdp=run.hsdp,
        sp=run.sp,
        schedule=run.schedule,
        chunks=run.chunks,
        microbatches=microbatches,
        recompute=run.recompute,
        autocast=run.autocast,
        **({"bucket_mib": 0.25} if run.zero < 3 else {}),  # type: ignore[arg-type]
    )

    def program(comm: Communicator) -> tuple[dict[str, int], float]:
        sizes = replace(SIZES, attention_window=run.model.window)
        device = "cpu" if run.autocast else "meta"
        dtype = torch.float32 if run.autocast else torch.bfloat16
        mesh, model = Mesh(comm, layout), GPT(sizes, dtype=dtype, device=device)
        parallel = parallelize(
            model, mesh, recipe, loss_of(model, mesh), carried_of(model, mesh, recipe)
        )
        groups = [{"params": list(parallel.model.parameters())}]
        optimizer = parallel.optimizer(torch.optim.SGD, groups, elementwise=True, lr=0.1)
        axes = {"tp": mesh.tp, "pp": mesh.pp, "cp": mesh.cp, "dp": mesh.data}
        tokens = [
            torch.zeros(run.microbatch, 128 // run.cp, dtype=torch.long, device=device)
        ] * microbatches
        where = [whereabouts(run.cp)] * microbatches
        if run.autocast:
            mine = positions("zigzag", run.cp, mesh.cp.rank, 128)
            where = [Where(positions=mine)] * microbatches
        for _ in range(2 if run.zero == 3 else 1):
            comm.barrier()
            before, started = {axis: axes[axis].traffic.bytes for axis in axes}, comm.clock()
            with nullcontext() if run.autocast else Computing(comm, FLOPS):
                parallel.zero_grad()
                parallel.step(tokens, tokens, where)
                optimizer.step()
        return {
            axis: axes[axis].traffic.bytes - before[axis] for axis in axes
        }, comm.clock() - started

    cluster = Cluster(Link(0.0, INSIDE), Link(0.0, ACROSS), NODE)
    ranks = minidist.run(program, layout.size, cluster=cluster)
    return {axis: sum(each[axis] for each, _ in ranks) for axis in ranks[0][0]}, max(
        seconds for _, seconds in ranks
    )


def whereabouts(cp: int) -> Where:
    """Return where a rank's tokens of each sequence are; without numbers, as all else here."""
    return Where(positions=torch.empty(128 // cp, dtype=torch.long, device="meta"))


LAYOUTS = {
    "dp 4": ({"dp": 4}, 1),
    "dp 3, accumulated": ({"dp": 3}, 3),
    "zero 1": ({"dp": 4, "zero": 1}, 1),
    "zero 2, accumulated": ({"dp": 2, "zero": 2}, 2),
    "zero 3": ({"dp": 4, "zero": 3}, 1),
    "zero 3, accumulated": ({"dp": 2, "zero": 3}, 2),
    "zero 3, recomputed": ({"dp": 2, "zero": 3, "recompute": "full"}, 1),
    "hsdp": ({"dp": 4, "zero": 3, "hsdp": 2}, 1),
    "tp 2": ({"tp": 2}, 1),
    "tp 4, recomputed": ({"tp": 4, "recompute": "full", "batch": 80}, 1),
    "tp 2, sp": ({"tp": 2, "sp": True}, 1),
    "tp 2, sp, recomputed": ({"tp": 2, "sp": True, "recompute": "full"}, 2),
    "dp 2 x tp 2, zero 1": ({"dp": 2, "tp": 2, "zero": 1}, 2),
    "pp 4": ({"pp": 4}, 8),
    "pp 2, interleaved": ({"pp": 2, "schedule": "interleaved", "chunks": 2}, 4),
    "pp 2, zb-h1": ({"pp": 2, "schedule": "zb-h1"}, 4),
    "pp 2 x tp 2, sp": ({"pp": 2, "tp": 2, "sp": True}, 4),
    "pp 2 x tp 2": ({"pp": 2, "tp": 2}, 4),
    "dp 2 x pp 2 x tp 2": ({"dp": 2, "pp": 2, "tp": 2, "zero": 1}, 4),
    "cp 2": ({"cp": 2}, 1),
    "cp 4, recomputed": ({"cp": 4, "recompute": "full"}, 2),
    "dp 2 x cp 2": ({"dp": 2, "cp": 2, "zero": 1}, 1),
}


OFTEN = (
    *("dp 4", "zero 2, accumulated", "zero 3", "hsdp", "tp 2, sp, recomputed"),
    *("pp 2, interleaved", "dp 2 x pp 2 x tp 2"),
    *("zero 1", "pp 4", "cp 2"),  # those by which `make mutants` finds slips
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name not in OFTEN)) for name in LAYOUTS]
)
def test_a_step_sends_and_takes_what_the_real_program_does(name: str) -> None:
    """To the byte, and to 2 % of the time."""
    how, microbatches = LAYOUTS[name]
    run = setup(**how)  # type: ignore[arg-type]
    run = replace(run, batch=run.dp * run.microbatch * microbatches)
    counted, seconds = really(run, microbatches)
    predicted = bytes_sent(run)
    assert {axis: predicted[axis] for axis in counted} == counted
    assert sum(step(run, exact=True).values()) == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_with_accumulation_are_what_a_meter_reads(zero: int) -> None:
    """At their most within a step of four microbatches.

    A run holds for a while what a plan leaves out: ZeRO 1 its part of the sum, ZeRO 2 two buckets,
    and ZeRO 3 the gradients of the layers at work, which a plan has with those layers.
    """
    ranks, count = 4, 4
    planned = bytes_held(replace(setup(dp=ranks, zero=zero), batch=ranks * 2 * count))

    def program(comm: Communicator) -> dict[str, int]:
        mesh, model = Mesh(comm, Layout(ranks)), GPT(SIZES, dtype=torch.bfloat16, device="meta")
        recipe = Recipe(zero=zero, microbatches=count, **({"bucket_mib": 0.25} if zero < 3 else {}))
        parallel = parallelize(model, mesh, recipe, loss_of(model, mesh))
        groups = list(parallel.model.parameters())
        optimizer = parallel.optimizer(MasterWeights, groups, optimizer=torch.optim.AdamW)
        tokens = [torch.zeros(2, 128, dtype=torch.long, device="meta")] * count
        account = Account(comm)
        account.watch(parallel.replica.called, optimizer)
        with account.recording():
            parallel.step(tokens, tokens, [whereabouts(1)] * count)
        optimizer.step()
        return {**account.sample(), "gradients": account.peaks["gradients"]}

    table = 2 * MODEL.vocabulary * MODEL.hidden
    largest = max(table, 2 * MODEL.layer)
    more = [0, planned["gradients"] / ranks, 2 * largest + 2**18, 2 * largest][zero]
    for held in minidist.run(program, ranks):
        for name in ("parameters", "optimizer"):
            assert held[name] == pytest.approx(planned[name], rel=0.01), name
        assert 0.99 * planned["gradients"] <= held["gradients"]
        assert held["gradients"] <= 1.01 * (planned["gradients"] + more)


AUTOCAST = {
    "dp 2": ({"dp": 2}, 1),
    "zero 1": ({"dp": 2, "zero": 1}, 1),
    "zero 3, accumulated": ({"dp": 2, "zero": 3}, 2),
    "tp 2": ({"tp": 2}, 1),
    "tp 2, recomputed": ({"tp": 2, "recompute": "full"}, 1),
    "tp 2, sp": ({"tp": 2, "sp": True}, 1),
    "tp 2, sp, recomputed": ({"tp": 2, "sp": True, "recompute": "full"}, 1),
    "pp 2": ({"pp": 2}, 2),
    "pp 2 x tp 2, sp": ({"pp": 2, "tp": 2, "sp": True}, 2),
    "cp 2": ({"cp": 2}, 1),
}


OFTEN_CAST = ("zero 3, accumulated", "tp 2, sp, recomputed", "pp 2 x tp 2, sp", "cp 2")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.soak] * (name not in OFTEN_CAST)) for name in AUTOCAST],
)
def test_under_autocast_it_sends_what_the_real_program_does(name: str) -> None:
    """To the byte; with numbers, as `meta` has no autocast."""
    how, microbatches = AUTOCAST[name]
    run = setup(autocast="bfloat16", **how)  # type: ignore[arg-type]
    run = replace(run, batch=run.dp * run.microbatch * microbatches)
    counted, _ = really(run, microbatches)
    predicted = bytes_sent(run)
    assert {axis: predicted[axis] for axis in counted} == counted


@pytest.mark.parametrize(("zero", "state"), [(0, (4, 4, 8)), (1, (4, 4, 2)), (3, (1, 1, 2))])
def test_under_autocast_states_are_in_32_bits_and_weights_have_copies(
    zero: int, state: tuple[float, ...]
) -> None:
    run = replace(setup(dp=4, zero=zero, autocast="bfloat16"), batch=8)
    held, layers = bytes_held(run), MODEL.layers * MODEL.layer
    numbers = layers + 2 * MODEL.vocabulary * MODEL.hidden
    found = (held["parameters"], held["gradients"], held["optimizer"])
    assert found == tuple(numbers * bytes for bytes in state)
    again = bytes_held(replace(run, recompute="full"))
    entries = MODEL.layers * run.entry
    layer = (held["activations"] - head_copy() - 2 * layers) / MODEL.layers
    assert again["activations"] == pytest.approx(
        entries + head_copy() + layer - run.entry + 2 * MODEL.layer
    )


def head_copy() -> int:
    """Return the bytes of the head in 16 bits."""
    return 2 * MODEL.vocabulary * MODEL.hidden


@pytest.mark.parametrize(
    ("cp", "window", "recompute"),
    [
        (2, 16, "none"),
        (2, 5, "full"),
        pytest.param(4, 5, "full", marks=pytest.mark.soak),
        pytest.param(4, 100, "none", marks=pytest.mark.soak),
    ],
)
def test_a_window_sends_what_the_real_program_does(cp: int, window: int, recompute: str) -> None:
    """To the byte: the tokens that another rank sees, and not whole blocks."""
    run = setup(cp=cp, recompute=recompute, model=replace(MODEL, window=window))
    run = replace(run, batch=2 * run.microbatch)
    counted, _ = really(run, 2)
    predicted = bytes_sent(run)
    assert predicted["cp"] == counted["cp"]
    full = bytes_sent(replace(run, model=MODEL))["cp"]
    assert counted["cp"] < full * (0.5 if window < 20 else 1)


@pytest.mark.parametrize("ranks", (2, 3, 8))
def test_tokens_that_are_seen_are_counted(ranks: int) -> None:
    """As context parallelism deals them out, in zigzag order."""
    time = 8 * ranks
    for window in range(1, time):
        sight = Sight("zigzag", ranks, first_seen(time, window))
        pairs = permutations(range(ranks), 2)
        assert tokens_seen(ranks, time, window) == sum(len(sight.wanted(*pair)) for pair in pairs)


@pytest.mark.parametrize("window", (1, 16, 100, 128, 0))
def test_operations_of_a_window_are_those_that_are_computed(window: int) -> None:
    """Of the pairs that attention computes; and those of a token, as the model itself counts."""
    places = torch.arange(128)
    seen = among(first_seen(128, window), places, places)
    query = torch.empty(2, 8, 128, 32, device="meta")
    computed = operations(query, query, False, tile=1, seen=seen)
    assert attended_pairs(128, window) * 4 * 2 * 8 * 32 == computed
    share = setup(model=replace(MODEL, window=window)).share
    share = replace(share, kernel="flash", device=replace(DEVICE, units=1, generation="h100"))
    if 0 < window < 128:
        assert attention(share, back=False) == pytest.approx(computed / FLOPS)
    config = replace(SIZES, attention_window=window)
    without = Model(8, 256, 8, 1024, kv=4, ffn=512, window=window)
    assert without.flops(128) - 6 * without.active == 12 * 8 * 256 * min(128, window or 128)
    norms = (2 * config.layers + 1) * config.hidden  # which the planner leaves out
    assert config.flops_per_token() - 6 * norms == without.flops(128)


# ---------------------------------------------------------------- a mixture of experts: what a rank holds

MIXED_SIZES = replace(SIZES, layers=4, intermediate=128, experts=8, top_k=2, shared_experts=1)
MIXED = Model(4, 256, 8, 1024, kv=4, ffn=128, experts=8, top_k=2, shared=1)
MIXTURES: dict[str, dict[str, int]] = {
    "ep 2": {"dp": 4, "ep": 2},
    "ep 2, zero 1": {"dp": 4, "ep": 2, "zero": 1},
    "ep 2, zero 2": {"dp": 4, "ep": 2, "zero": 2},
    "ep 2, zero 3": {"dp": 4, "ep": 2, "zero": 3},
    "experts with one copy": {"dp": 4, "ep": 4, "zero": 1},
    "experts with one copy, zero 3": {"dp": 4, "ep": 4, "zero": 3},
    "no experts shared out": {"dp": 4, "zero": 3},
    "along tp, too": {"dp": 2, "tp": 2, "ep": 2, "zero": 1},
    "along tp alone": {"dp": 2, "tp": 2, "zero": 3},
    "dp x cp": {"dp": 2, "cp": 2, "ep": 2, "zero": 2},
}


def really_held(run: Setup, sizes: GPTConfig = MIXED_SIZES) -> dict[str, int]:
    """Take a step of the real program; return the bytes by category that the fullest rank holds
    after it.
    """
    layout = Layout(run.dp, run.pp, run.cp, run.tp, run.ep)
    recipe = Recipe(zero=run.zero, fp8=run.bits8)

    def program(comm: Communicator) -> dict[str, int]:
        mesh, model = Mesh(comm, layout), GPT(sizes, dtype=torch.bfloat16, device="meta")
        parallel = parallelize(
            model, mesh, recipe, loss_of(model, mesh), carried_of(model, mesh, recipe)
        )
        trained = list(parallel.model.parameters())
        optimizer = parallel.optimizer(MasterWeights, trained, optimizer=torch.optim.AdamW)
        tokens = torch.zeros(run.microbatch, 128 // run.cp, dtype=torch.long, device="meta")
        parallel.step([tokens], [tokens], [whereabouts(run.cp)])
        optimizer.step()
        account = Account()
        account.watch(parallel.replica.called, optimizer)
        return account.sample()

    ranks = minidist.run(program, layout.size)
    return max(ranks, key=lambda each: each["parameters"] + each["optimizer"])


OFTEN_HELD = (
    *("no experts shared out", "ep 2, zero 1", "ep 2, zero 3", "along tp, too"),
    "experts with one copy, zero 3",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.soak] * (name not in OFTEN_HELD)) for name in MIXTURES],
)
def test_experts_states_are_divided_by_their_copies(name: str) -> None:
    """To an element of each tensor, as shards are whole ones, and AdamW's 4 bytes for the number of
    its steps.

    The planner leaves out norms, 2 hidden a layer and one more, and what ZeRO 1 of this package has
    beside the whole gradients, its shards of their sum.
    """
    run = replace(setup(), model=MIXED, **MIXTURES[name])  # type: ignore[arg-type]
    run = replace(run, batch=run.dp * run.microbatch)
    planned, counted = bytes_held(run), really_held(run)
    planned["gradients"] += planned["optimizer"] / 12 * 2 if run.zero == 1 else 0
    norms, tensors = (
        (2 * MIXED.layers + 1) * MIXED.hidden,
        len([*GPT(MIXED_SIZES, device="meta").parameters()]),
    )
    data = run.dp * run.cp
    each = {
        "parameters": 2 / (data if run.zero == 3 else 1),
        "gradients": 2 / (data if run.zero >= 2 else 1) + (2 / data if run.zero == 1 else 0),
        "optimizer": 12 / (data if run.zero else 1),
    }
    for state, bytes in each.items():
        beside = counted[state] - planned[state] - bytes * norms
        assert 0 <= beside <= (16 if state == "optimizer" else 2) * tensors, state


@pytest.mark.parametrize(
    "how", (pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.soak), {"dp": 2, "zero": 3}), ids=str
)
def test_products_of_8_bits_leave_states_as_they_are(how: dict[str, int]) -> None:
    run = replace(setup(), precision="fp8", **how)  # type: ignore[arg-type]
    run = replace(run, batch=run.dp * run.microbatch)
    sizes = replace(SIZES, sequence=128)
    planned, counted = bytes_held(run), really_held(run, sizes)
    norms = (2 * MODEL.layers + 1) * MODEL.hidden
    shards = run.dp if run.zero == 3 else 1
    tensors = len([*GPT(sizes, device="meta").parameters()])
    for state, bytes in {"parameters": 2, "gradients": 2, "optimizer": 12}.items():
        beside = counted[state] - planned[state] - bytes * norms / shards
        assert 0 <= beside <= (16 if state == "optimizer" else 2) * tensors, (state, beside)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.soak] * (name != "ep 2, zero 3")) for name in MIXTURES],
)
def test_experts_of_8_bits_have_states_as_any_others_have(name: str) -> None:
    """To the byte, on ten layouts, beside what the same program holds in 16 bits."""
    run = replace(setup(), model=MIXED, **MIXTURES[name])  # type: ignore[arg-type]
    run = replace(run, batch=run.dp * run.microbatch)
    lower = replace(run, precision="fp8")
    states = ("parameters", "gradients", "optimizer")
    planned, counted = bytes_held(lower), really_held(lower)
    same, usual = bytes_held(run), really_held(run)
    assert all(planned[state] == same[state] for state in states)
    assert all(counted[state] == usual[state] for state in states)


@pytest.mark.parametrize(
    "name", (pytest.param("ep 2, zero 1", marks=pytest.mark.soak), "ep 2, zero 3", "along tp, too")
)
def test_gradients_of_experts_go_to_their_copies(name: str) -> None:
    """To the byte, in the second step: in the first, ZeRO 3 only learns in which order the layers
    come.
    """
    run = replace(setup(), model=MIXED, **MIXTURES[name])  # type: ignore[arg-type]
    run = replace(run, batch=run.dp * run.microbatch)
    layout, recipe = Layout(run.dp, run.pp, run.cp, run.tp, run.ep), Recipe(zero=run.zero)

    def program(comm: Communicator) -> int:
        mesh, model = Mesh(comm, layout), GPT(MIXED_SIZES, dtype=torch.bfloat16, device="meta")
        parallel = parallelize(
            model, mesh, recipe, loss_of(model, mesh), carried_of(model, mesh, recipe)
        )
        trained = [{"params": list(parallel.model.parameters())}]
        optimizer = parallel.optimizer(torch.optim.SGD, trained, elementwise=True, lr=0.1)
        tokens = torch.zeros(run.microbatch, 128, dtype=torch.long, device="meta")
        groups = {mesh.data} | {copies_of(parameter, mesh.data) for parameter in model.parameters()}
        counts = []
        for _ in range(3):
            comm.barrier()
            counts.append(sum(group.traffic.bytes for group in groups))
            parallel.zero_grad()
            parallel.step([tokens], [tokens], [whereabouts(run.cp)])
            optimizer.step()
        return counts[2] - counts[1]

    assert sum(minidist.run(program, layout.size)) == bytes_sent(run)["dp"]
