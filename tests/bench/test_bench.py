"""`python -m minidist bench`: tiny sizes from end to end, formulas, bounds. Never how long anything
took.
"""

from __future__ import annotations

import json
import subprocess
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import clean_environment, mpirun, warm_environment, warm_python
from torch.distributed.fsdp import FSDPModule

import minidist
from minidist.bench import main, nccl
from minidist.bench.gpu import one_rank, turns
from minidist.bench.gpu.competitors import BITS, Work, build
from minidist.bench.measure import BUS_FACTORS, Measurement
from minidist.bench.options import NAMES, parse, size_text
from minidist.bench.report import Results, quantity
from minidist.bench.subject import ON_ONE_GPU, Setting, find_subject
from minidist.bench.subjects import tensor
from minidist.bench.subjects.copy import state
from minidist.bench.training import expect_same
from minidist.full import DDP, FSDP, DataParallel, ZeRO1
from minidist.full.collectives import COLLECTIVES
from minidist.full.comm import Communicator
from minidist.full.model import GPTConfig
from minidist.full.model.mlp import MLP
from minidist.full.precision import fp8


def bench(*arguments: str) -> dict[str, Any]:
    """Run a bench as a user would, and return its JSON."""
    command = [*warm_python(), "-m", "minidist", "bench", *arguments, "--json", "-"]
    done = subprocess.run(
        command, env=warm_environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def names(found: dict[str, Any], launch: str = "shipped") -> set[tuple[str, str, str]]:
    """Return which competitors were measured, but for the probe."""
    rows = [row for row in found["results"] if row["launch"] == launch and row["bench"] != "copy"]
    return {(row["bench"], row["case"], row["competitor"]) for row in rows}


# ---------------------------------------------------------------- from end to end


@pytest.mark.soak
def test_two_launches() -> None:
    """One bench of all: of collectives, which have a second launch."""
    found = bench(
        "all-reduce",
        "--sizes",
        "4KiB",
        "--rounds",
        "1",
        "--algorithms",
        "auto,handle,registered,ring",
    )
    assert names(found) == {
        ("all_reduce", "4 KiB", who)
        for who in ("auto", "handle", "registered", "ring", "native", "gloo")
    }
    assert {(name, who) for name, _, who in names(found, "tuned")} > {
        ("all_reduce", "auto"),
        ("all_reduce", "native"),
    }


@pytest.mark.soak
def test_steps_of_training() -> None:
    """Each competitor of a shorter run is below; this is a command as a user types it."""
    trained = bench("ddp", "--rounds", "1", "--hidden", "16")
    assert {who for name, _, who in names(trained) if name == "ddp"} == {
        "local",
        "DDP",
        "naive",
        "torch DDP",
    }


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_everything_at_once() -> None:
    found = bench(
        "all",
        "--sizes",
        "4KiB",
        "--rounds",
        "1",
        "--algorithms",
        "auto,handle,registered,ring",
        "--hidden",
        "16",
    )
    measured = names(found)
    assert {name for name, _, _ in measured} == set(NAMES) - {"copy", "threads"}
    competitors = {name: {who for what, _, who in measured if what == name} for name in NAMES}
    assert competitors["all_reduce"] == {"auto", "handle", "registered", "ring", "native", "gloo"}
    assert competitors["all_gather"] == {"auto", "handle", "ring", "native", "gloo"}
    assert all(competitors[name] >= {"auto", "native", "gloo"} for name in COLLECTIVES)
    assert competitors["p2p"] == {"send", "native", "gloo"}
    assert competitors["ddp"] == {"local", "DDP", "naive", "torch DDP"}
    assert competitors["zero"] == {"local", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "fully_shard"}
    assert competitors["pipeline"] == {
        "serial",
        "gpipe",
        "1f1b",
        "zb-h1",
        "torch gpipe",
        "torch 1f1b",
    }
    assert competitors["context"] == {"serial", "ring", "zigzag", "torch ring", "torch zigzag"}
    assert competitors["tensor"] == {"serial", "tensor", "DTensor"}
    assert competitors["experts"] == {"ep", "ep balanced", "dense", "bytes alone", "torch"}
    assert competitors["compress"] == {"DDP", "PowerSGD", "PowerSGD, gloo", "torch PowerSGD"}
    assert competitors["adamw"] == {"one pass", "torch fused", "torch foreach"}
    assert competitors["flash"] == {"page", "flash", "torch"}
    assert competitors["recompute"] == {"stored", "full", "torch full"}
    assert {name for name, _, _ in names(found, "tuned")} == set(COLLECTIVES)
    assert not {row["competitor"] for row in found["results"] if row["launch"] == "tuned"} & {
        "gloo",
        "torch DDP",
    }

    rows = {
        (row["bench"], row["case"], row["competitor"], row["launch"]): row
        for row in found["results"]
    }
    auto = rows["all_reduce", "4 KiB", "auto", "shipped"]
    assert len(auto["values"]) == 1 and min(auto["values"]) > 0
    # 2 (P - 1)/P = 1 for two ranks
    assert auto["bus_bandwidth"] == pytest.approx(4096 / auto["median"])
    assert set(auto["ratios"]) == {"native", "gloo"} and min(auto["ratios"].values()) > 0
    assert set(rows["ddp", "D=16, 1 x 64", "DDP", "shipped"]["ratios"]) == {"local", "torch DDP"}
    activations = rows["recompute", "D=16, 12 layers, activations", "full", "shipped"]
    assert activations["ratios"]["torch full"] <= 1 and activations["ratios"]["stored"] < 0.25
    error = rows["threads", "64 ranks, ring", "virtual time / formula - 1", "here"]
    assert max(error["values"]) <= 1e-12

    bounds = {(bound["bench"], bound["competitor"], bound["peer"]) for bound in found["bounds"]}
    assert bounds >= {
        ("all_reduce", "auto", "native"),
        ("all_reduce", "auto", "gloo"),
        ("threads", "wall time", ""),
    }
    launches = ("shipped", "tuned")
    assert set(found["states"]) == {
        f"{launch} {when}" for launch in launches for when in ("before", "after")
    }
    assert set(found["states"].values()) <= {"near", "far"}
    assert found["machine"]["cores"] >= 1 and found["machine"]["mpi"] and found["machine"]["torch"]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["p2p", "reduce-scatter"])
def test_three_ranks_a_table_and_a_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    small = [
        "--ranks",
        "3",
        "--sizes",
        "100,3KiB",
        "--rounds",
        "2",
        "--peers",
        "native",
        "--json",
        str(file),
    ]
    command = [*warm_python(), "-m", "minidist", "bench", name, *small]
    done = subprocess.run(
        command, env=warm_environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    ours = ("send",) if name == "p2p" else ("auto", "handle")
    # a multiple of 3 floats
    sizes = ["8 B", "100 B", "3 KiB"] if name == "p2p" else ["96 B", "3 KiB"]
    assert names(found) == {
        (name.replace("-", "_"), size, who) for size in sizes for who in (*ours, "native")
    }
    assert f"{name.replace('-', '_')}, 3 ranks" in done.stdout and "other core" in done.stdout
    assert not found["bounds"], "the bounds are for two ranks"
    for row in (row for row in found["results"] if row["bench"] != "copy"):
        assert len(row["values"]) == 2 and min(row["values"]) > 0
        assert row["lower_quartile"] <= row["median"] <= row["upper_quartile"]


def test_tensor_and_dtensor_compute_and_send_the_same() -> None:
    """Loss and gradients, the number of all-reduces, the bytes."""
    job = mpirun(
        2,
        """
        import tempfile

        import torch
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.debug import CommDebugMode

        from minidist.bench.subjects.tensor import by_torch, ours
        from minidist.bench.training import forward_backward, gpt
        from minidist.bench.worker import start_gloo
        from minidist.full.comm import init
        from minidist.full.placement import placement_of

        def full(name, parameter):
            if name == "tensor":
                return placement_of(parameter).block.full(parameter.grad)
            return parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad

        comm = init(limit=60)
        gloo = start_gloo(comm, comm.all_gather_object(tempfile.mktemp())[0])
        tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
        models = {name: gpt(16, 8) for name in ("serial", "tensor", "DTensor")}
        runs = {"serial": forward_backward(models["serial"], tokens), "tensor": ours(models["tensor"], tokens, comm)}
        runs["DTensor"] = by_torch(models["DTensor"], tokens, comm.size)

        reductions = 2 * 2 * 4 + 2  # forward and backward, attention and MLP of 4 layers; embedding, head
        with CommDebugMode() as counted:
            losses = {"DTensor": runs["DTensor"]()}
        assert counted.get_total_counts() == reductions + 3  # of the loss: maximum, normalizer, target
        before = comm.traffic.bytes
        losses["tensor"] = runs["tensor"]()
        assert comm.traffic.bytes - before == 4 * 2 * 8 * (reductions * 16 + 3)

        losses["serial"] = runs["serial"]()
        found = {name: {"loss": losses[name]} for name in models}
        for name, model in models.items():
            found[name] |= {which: full(name, each) for which, each in model.named_parameters()}
        for name in ("tensor", "DTensor"):
            assert found[name].keys() == found["serial"].keys()
            for what, tensor in found["serial"].items():
                assert (found[name][what] - tensor).abs().max() <= 1e-5 * tensor.abs().max(), (name, what)
        print("the same")
        gloo.destroy_process_group()
        """,
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("the same") == 2


def test_competitors_whose_losses_differ_are_not_compared() -> None:
    expect_same({"serial": 2.0, "DTensor": torch.tensor(2.0 + 1e-5)}, tensor.SAME)
    for wrong in (2.0 + 1e-4, float("nan")):
        with pytest.raises(RuntimeError, match="these do not train the same model"):
            expect_same({"serial": 2.0, "DTensor": torch.tensor(wrong)}, tensor.SAME)


# ---------------------------------------------------------------- formulas, ratios, bounds


def one(
    competitor: str, *values: float, bench: str = "all_reduce", launch: str = "shipped"
) -> Measurement:
    """Return a measurement of 4 KiB on two ranks."""
    return Measurement(bench, "4 KiB", competitor, launch, values, bytes=4096, ranks=2)


@pytest.mark.parametrize(
    ("bench", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 8, 14 / 8),
        ("reduce_scatter", 4, 3 / 4),
        ("all_gather", 4, 3 / 4),
        ("all_to_all", 4, 3 / 4),
        ("gather", 4, 3 / 4),
        ("scatter", 4, 3 / 4),
        ("broadcast", 4, 1.0),
        ("reduce", 4, 1.0),
        ("p2p", 4, 1.0),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(bench: str, ranks: int, factor: float) -> None:
    measurement = Measurement(
        bench, "", "auto", "shipped", (0.5, 0.25, 1.0), bytes=1000, ranks=ranks
    )
    assert measurement.bus_bandwidth == pytest.approx(factor * 1000 / 0.5)
    assert set(BUS_FACTORS) == {*COLLECTIVES, "p2p"}


def test_a_step_has_no_bus_bandwidth() -> None:
    assert Measurement("ddp", "D=16", "DDP", "shipped", (1.0,)).bus_bandwidth is None


def test_ratios_are_taken_within_a_round() -> None:
    """Two rounds on a slow machine, one on a fast one: medians of each alone would say 3.0 /
    2.0.
    """
    assert one("auto", 1.0, 3.0, 8.0).ratio(one("native", 2.0, 1.5, 16.0)) == 0.5


def test_bounds_are_judged_on_their_launch_and_never_on_another_dtype() -> None:
    measurements = [
        one("auto", 1.0, 1.4, 1.6),
        one("native", 1.0, 1.0, 1.0),
        one("gloo", 40.0, 40.0, 40.0),
        one("auto", 9.0, launch="tuned"),
        one("native", 3.0, launch="tuned"),
    ]
    results = Results(measurements, "float32", {})
    assert {v.bound.peer: (pytest.approx(v.measured), v.met) for v in results.verdicts} == {
        "native": (1.4, True),
        "gloo": (0.035, False),
    }
    text = results.as_text()
    assert (
        "met: all_reduce 4 KiB auto / native: 1.4, at most 1.5" in text
        and "bounds: 1 of 2 met" in text
    )
    assert "MISSED: all_reduce 4 KiB auto / gloo: 0.035, at most 0.02" in text
    ratios = {
        (row["competitor"], row["launch"]): row["ratios"] for row in results.as_json()["results"]
    }
    assert ratios["auto", "tuned"] == {"native tuned": 3.0}
    assert not Results(measurements, "float64", {}).verdicts


def test_on_gpus_ratios_to_nccl_s_own_are_in_the_json() -> None:
    rows = Results(
        [one("ring", 1.0, 3.0, launch="nccl"), one("native", 2.0, 2.0, launch="nccl")],
        "float32",
        {},
    ).as_json()["results"]
    assert [row["ratios"] for row in rows] == [{"native": 1.0}, {}]


def test_every_bench_says_what_it_measures_and_bounds_what_it_reports() -> None:
    for name in (*NAMES, *ON_ONE_GPU):
        subject = find_subject(name)
        assert subject.name == name and subject.cases.__doc__
        for bound in subject.bounds:
            assert bound.limit > 0 and (not bound.peer or bound.peer in subject.peers)


def test_states_sizes_and_quantities() -> None:
    assert (state(45.0), state(25.0)) == ("near", "far")
    assert [size_text(bytes) for bytes in (8, 4096, 96, 16 << 20, 1 << 30)] == [
        "8 B",
        "4 KiB",
        "96 B",
        "16 MiB",
        "1 GiB",
    ]
    assert (
        quantity(1.234e-5, "s") == "12.3 us"
        and quantity(0.0451, "s") == "45.1 ms"
        and quantity(45.0, "GB/s") == "45 GB/s"
    )
    assert parse(["p2p", "--sizes", "8,4KiB,1MB,2 GiB"]).sizes == (8, 4096, 1_000_000, 2 << 30)


def test_sizes_that_are_the_same_are_measured_once() -> None:
    """Cases have their size for a name, by which ratios are found: of two, one had the other's."""
    words = "all-reduce --sizes 1,2,8,4KiB,4096,4100 --peers none --algorithms ring"
    options = parse([*words.split(), "--hidden", "16,16"])
    assert options.hidden == (16,)

    def cases(comm: Communicator) -> list[str]:
        setting = Setting(options, "shipped", comm)
        return [case.name for case in find_subject("all_reduce").cases(setting)]

    # whole float32 on each of two ranks, and at least one
    assert minidist.run(cases, 2) == [["8 B", "4 KiB"]] * 2


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["all-reduced"], "no bench 'all-reduced': choose one of"),
        (["p2p", "--ranks", "1"], "at least 2"),
        (["p2p", "--sizes", "4KiB,huge"], "'huge' is not a size"),
        (["all-gather", "--algorithms", "tree"], "all_gather offers auto"),
        (["broadcast", "--algorithms", "native"], "native is one of --peers"),
        (["all-reduce", "--peers", "nccl"], "choose among native, tuned, gloo"),
        (["ddp", "--hidden", "20"], "multiple of 8"),
        (["tensor", "--ranks", "3"], "4 heads of its model"),
        (["checkpoint", "--ranks", "3"], "deals out the 4 heads of its model, so use 2 or 4"),
        (["context", "--ranks", "3"], "512 tokens, in two pieces a rank, so use 2, 4, 8, 16, 32"),
        (["experts", "--ranks", "3"], "experts deals out its 8 experts, so use 2, 4 or 8"),
        (["pipeline", "--ranks", "5"], "pipeline deals out its 4 layers, so use at most 4"),
        (["reduce", "--dtype", "int16"], "gloo knows no such numbers: add --peers native,tuned"),
        (["nccl", "--dtype", "int16"], "NCCL and gloo know no such numbers: give another"),
        (["copy", "--json", "/no/such/folder/file"], "cannot be written (No such file"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert words in capsys.readouterr().err


def test_under_mpirun_it_says_that_it_starts_its_ranks_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    assert main(["copy"]) == 2
    assert "start it without mpirun" in capsys.readouterr().err


# ---------------------------------------------------------------- on GPUs, tried on the CPU

TINY = ["--device", "cpu", "--rounds", "2"]


def on_cpu(*arguments: str, file: Path) -> tuple[str, dict[str, Any]]:
    """Run a bench for GPUs on the CPU as a user would; return what it prints, and its JSON."""
    command = [*warm_python(), "-m", "minidist", "bench", *arguments, *TINY, "--json", str(file)]
    done = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


def test_bench_gpu_from_end_to_end(tmp_path: Path) -> None:
    """Speed is by counted operations, the peak holds weights and moments, and nothing is judged
    away from an H100.
    """
    text, found = on_cpu(
        "gpu", "--case", "eager,products,attention", "--batch", "2", file=tmp_path / "found.json"
    )
    rows = {(row["bench"], row["case"], row["competitor"]): row for row in found["results"]}
    steps = {("sharded", who) for who in ("no strategy", "fully_shard", "FSDP")}
    steps |= {("replicated", who) for who in ("torch DDP", "DDP", "ZeRO-1")}
    config = GPTConfig(vocabulary=128, layers=2, hidden=64, heads=1, sequence=32)
    expected = {("products", "64 wide", "bf16"), ("products", "64 wide", "fp8")}
    for how in ("64 tokens, forward", "64 tokens, with backward"):
        expected |= {("attention", how, "flash"), ("attention", how, "FLASH_ATTENTION")}
    for case in ("2 x 32 eager", "2 x 32 eager, recompute"):
        eight = (
            {("eight_bits", who) for who in ("FSDP", "FSDP, fp8")}
            if case == "2 x 32 eager"
            else set()
        )
        for bench, who in steps | eight:
            expected |= {(bench, case, who), (bench, f"{case}, peak", who)}
            row, peak = rows[bench, case, who], rows[bench, f"{case}, peak", who]
            assert row["flops"] == config.flops_per_token() * 2 * 32
            assert f"{row['flops'] / row['median'] / 1e12:.3g}" in text
            assert len(row["values"]) == 2 and min(row["values"]) > 0
            assert peak["unit"] == "GiB" and peak["median"] * 2**30 > 3 * 4 * config.parameter_count
    assert rows.keys() == expected
    ratios = rows["sharded", "2 x 32 eager, peak", "FSDP"]["ratios"]
    assert ratios.keys() == {"no strategy", "fully_shard"}
    assert rows["replicated", "2 x 32 eager", "DDP"]["ratios"].keys() == {"torch DDP"}
    assert not found["bounds"] and "they are not judged here" in text and "/ fully_shard" in text


def test_bench_nccl_has_the_columns_of_nccl_tests(tmp_path: Path) -> None:
    arguments = ["nccl", "--ranks", "2", "--sizes", "4KiB", "--algorithms", "ring,pairwise"]
    text, found = on_cpu(*arguments, file=tmp_path / "found.json")
    assert {(row["bench"], row["competitor"]) for row in found["results"]} == {
        *((name, "native") for name in COLLECTIVES),
        *((name, "ring") for name in ("all_reduce", "reduce_scatter", "all_gather")),
        *((name, "pairwise") for name in ("reduce_scatter", "all_gather", "all_to_all")),
    }
    seen = set()
    for part in text.split("\n\n"):
        title, header, *lines = part.splitlines()
        operation, place = title.split(", ")[0], title.split(", ")[2]
        assert (
            " ".join(header.split())
            == "by size (B) count type redop time (us) algbw (GB/s) busbw (GB/s)"
        )
        for line in lines:
            _, size, count, dtype, reduction, microseconds, algorithm, bus = line.split()
            whole = operation in ("all_reduce", "broadcast", "reduce")
            assert (size, count, dtype) == ("4096", "1024" if whole else "512", "float")
            assert place == ("in place" if whole else "out of place")
            assert reduction == ("sum" if "reduce" in operation else "none")
            assert float(algorithm) == pytest.approx(4096 / float(microseconds) / 1e3, rel=1e-2)
            assert float(bus) == pytest.approx(
                BUS_FACTORS[operation](2) * float(algorithm), rel=1e-2
            )
        seen.add(operation)
    assert seen == set(COLLECTIVES)


@pytest.fixture
def alone() -> Iterator[Communicator]:
    """One rank of torch.distributed, on gloo."""
    with one_rank("cpu") as comm:
        yield comm


OURS = {"DDP": DDP, "ZeRO-1": ZeRO1, "FSDP": FSDP}
COMPETITORS = (
    "no strategy",
    "torch DDP",
    "DDP",
    "ZeRO-1",
    "fully_shard",
    "fully_shard, forward",
    "FSDP",
)
SMALL = Work(
    GPTConfig(vocabulary=64, layers=2, hidden=32, heads=1, sequence=16), 2, torch.device("cpu")
)


def test_each_competitor_is_what_it_says(alone: Communicator) -> None:
    """Its class, what is compiled, what is recomputed; and the loss, which must not depend on any
    of that.
    """
    graphs: list[Any] = []

    def counted(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    losses = {}
    calls: list[object] = []
    for name in COMPETITORS:
        for recompute, times in ((False, 2), (True, 4)):
            spread, step = build(name, SMALL._replace(recompute=recompute), alone)
            inner: Any = getattr(spread, "module", spread)
            theirs = (
                torch.nn.parallel.DistributedDataParallel
                if name == "torch DDP"
                else torch.nn.Module
            )
            assert isinstance(spread, OURS.get(name, theirs)), name
            assert isinstance(spread, DataParallel) == (name in OURS)
            sharded = [
                isinstance(module, FSDPModule) for module in (inner, *inner.layers.children())
            ]
            assert sharded == [name.startswith("fully_shard")] * 3
            for module in inner.modules():
                if isinstance(module, MLP):
                    module.register_forward_pre_hook(lambda *_: calls.append(1))
            losses[name, recompute] = float(step())  # type: ignore[arg-type]
            assert len(calls) == times, (
                f"{name}: 2 blocks, and 2 again in backward if they are recomputed"
            )
            calls.clear()
        if isinstance(spread, FSDP):
            assert {(flat.unsharded.dtype, flat.shard.values.dtype) for flat in spread.flats} == {
                (BITS, torch.float32)
            }
            assert len(spread.units) == 3
        assert not graphs
        torch._dynamo.reset()
        _, step = build(name, SMALL._replace(backend=counted), alone)  # type: ignore[arg-type]
        losses[name, "compiled"] = float(step())  # type: ignore[arg-type]
        assert len(graphs) == 2, (
            f"{name}: one graph of a whole block, which serves all blocks, and one of the loss"
        )
        graphs.clear()
    assert max(losses.values()) < 1.002 * min(losses.values()), losses


def test_a_competitor_in_8_bits_multiplies_in_8_bits(
    alone: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, products, multiply = [], [], fp8.scaled_matmul
    monkeypatch.setattr(fp8, "scaled_matmul", lambda *each: products.append(1) or multiply(*each))
    for name in ("FSDP", "FSDP, fp8"):
        spread, step = build(name, SMALL, alone)
        losses.append(float(step()))  # type: ignore[arg-type]
        seen = [bool(scale.history.any()) for scale in fp8.scales_of(spread)]
        # three products and three scales of each
        layers = 7 * SMALL.config.layers if name == "FSDP, fp8" else 0
        assert len(products) == len(seen) == 3 * layers and all(seen), name
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=turns.SAME)


def test_competitors_that_train_different_models_are_found_out(
    alone: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        turns, "build", lambda name, *_: (None, lambda: 1.0 if name == "FSDP" else 1.1)
    )
    setting = Setting(parse(["gpu", "--rounds", "1"]), "here", alone)
    with pytest.raises(RuntimeError, match="do not train the same model"):
        list(turns.side_by_side(["FSDP", "fully_shard"], SMALL, setting))


def test_competitors_without_room_side_by_side_are_measured_one_by_one(
    alone: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = weakref.WeakSet[Any]()

    class Step:
        def __call__(self) -> float:
            if len(resident) > 1:
                raise torch.OutOfMemoryError
            return 1.0

    def build(*_: object) -> tuple[None, Step]:
        step = Step()
        resident.add(step)
        return None, step

    monkeypatch.setattr(turns, "build", build)
    setting = Setting(parse(["gpu", "--rounds", "1"]), "here", alone)
    found = [
        case for case in turns.side_by_side(["FSDP", "fully_shard"], SMALL, setting) if case.values
    ]
    name = "2 x 16 eager, one by one"
    assert [(case.name, [*case.values]) for case in found] == [
        (case, [who]) for who in ("FSDP", "fully_shard") for case in (name, f"{name}, peak")
    ]


def test_a_bound_may_be_a_least_and_the_bounds_of_a_gpu_can_be_left_unjudged() -> None:
    case = "8 x 2048 compiled, share of the peak"
    rows = [Measurement("sharded", case, "FSDP", "here", (0.5,), "")]
    assert (
        "MISSED: sharded 8 x 2048 compiled, share of the peak FSDP: 0.5, at least 0.52"
        in Results(rows, "", {}).as_text()
    )
    met = Results([rows[0]._replace(values=(0.53,))], "", {})
    assert "FSDP: 0.53, at least 0.52" in met.as_text() and "bounds: 1 of 1 met" in met.as_text()
    unjudged = Results(rows, "", {}, judged=False)
    assert not unjudged.verdicts and "not judged here" in unjudged.as_text()


def test_without_a_gpu_it_says_how_to_try_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["gpu"]) == 2
    assert "finds no GPU here: try it on the CPU with --device cpu" in capsys.readouterr().err
    assert main(["nccl"]) == 2
    assert "need a GPU each, and there are 0" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(nccl, "share_gpus", lambda *_: None)
    monkeypatch.setenv("MINIDIST_RANKS_PER_GPU", "2")
    assert "--nproc-per-node" in nccl.on_gpus(parse(["nccl"]))[0]
    row = Measurement("all_reduce", "4 KiB", "native", "nccl", (1.0,), bytes=4096, ranks=2)
    assert nccl.as_text([row], parse(["nccl"])).endswith(
        "2 ranks share a GPU: not a measure of speed"
    )
