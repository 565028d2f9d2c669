"""What `plan` answers: commands that `train` takes, layouts that differ, and a picture that can be
told apart.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb

from minidist.__main__ import main as minidist_main
from minidist.cli.plan.answer import name_of
from minidist.cli.plan.command import main
from minidist.cli.plan.dry_run import PaperMesh
from minidist.draw.plan import BYTES, STEP
from minidist.full.model import GPT
from minidist.full.trainer.checked import check_order, check_run, layout_of
from minidist.further import parse
from minidist.plan.device import PlanError, machine
from minidist.plan.memory import bytes_held
from minidist.plan.model import Model, model
from minidist.plan.run import Setup
from minidist.plan.search import RESERVE, search, shares
from minidist.plan.step import step

ASKED = ["--model", "llama-8b", "--cluster", "h100:16", "--tokens", "100B", "--batch", "1M"]


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what the command prints for people."""
    assert main([*words]) == 0
    return capsys.readouterr().out


# ---------------------------------------------------------------- what is planned can be trained


def drawn(seed: int, folder: Path) -> tuple[list[str], Model]:
    """Draw a model, a cluster and a batch; return the words of `plan` for them, and the model."""
    draw = random.Random(seed)
    kv = draw.choice((1, 2, 3, 4, 6, 8))
    heads = kv * draw.choice((1, 2, 4, 8))
    sizes = {
        "layers": draw.choice((2, 3, 5, 8, 12, 14)),
        "heads": heads,
        "kv": kv,
        "hidden": heads * draw.choice((32, 64, 128)),
        "ffn": draw.choice((0, 1000, 1408, 4096)),
        "vocabulary": draw.choice((256, 1000, 32000, 50257)),
        "tied": draw.random() < 0.4,
    }
    if draw.random() < 0.4:
        experts = draw.choice((2, 4, 6, 8, 16))
        top_k, shared = draw.randint(1, min(4, experts)), draw.choice((0, 1, 2))
        sizes |= {"experts": experts, "top_k": top_k, "shared": shared}
    cluster = f"{draw.choice(('a100', 'h100', 'v100'))}:{draw.choice((1, 2, 4, 8, 16, 24, 64))}"
    fixed = draw.choice(
        ("", "", "", "zero=3", "tp=8", "tp=2", "pp=2", "cp=2", "ep=2", "offload=true zero=1")
    )
    offered = ("bf16", "bf16", "autocast", "fp8")[: 4 if cluster.startswith("h100") else 3]
    precision = draw.choice(offered)
    file = folder / "model.toml"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in sizes.items()))
    sequence, batch = draw.choice((512, 4096, 16384)), draw.choice((24, 96, 128))
    words = [
        "--model",
        str(file),
        "--cluster",
        cluster,
        "--sequence",
        str(sequence),
        "--precision",
        precision,
    ]
    return [*words, "--batch", str(batch * sequence), "--why", fixed, "--format", "json"], Model(
        **sizes
    )


@pytest.mark.parametrize(
    ("seeds", "least"),
    [(range(12), 25), pytest.param(range(30), 60, marks=pytest.mark.soak)],
)
def test_what_is_planned_can_be_trained(
    seeds: range, least: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of random models and clusters: each command that is printed is read and checked by `train`
    itself.
    """
    taken = refused = 0
    for seed in seeds:
        words, planned = drawn(seed, tmp_path)
        if main(words) != 0:
            assert "no layout fits" in capsys.readouterr().err
            continue
        answered = json.loads(capsys.readouterr().out)
        assert not [reason for reason in answered["refused"] if "does not run" in reason], (
            "search knows better"
        )
        for layout in answered["layouts"]:
            shape = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", layout["layout"])}
            microbatch = shape.pop("microbatch")
            if not layout["command"]:
                assert layout["no_command"]
                refused += 1
                continue
            config = parse(
                layout["command"][-1].removeprefix("srun python -m minidist train ").split()
            )
            where = machine(words[3])
            mesh = PaperMesh(layout_of(config, where.total), where.node)
            check_order(mesh.layout, mesh.world.nodes)
            run = check_run(config, mesh, planned.vocabulary)
            assert {name: getattr(config.parallel, name) for name in shape} == shape
            rows = config.data.batch // (mesh.layout.dp * run.fit.recipe.microbatches)
            assert rows == microbatch
            built = sum(each.numel() for each in GPT(run.sizes, device="meta").parameters())
            norms = (2 * planned.layers + 1) * planned.hidden
            assert built == planned.parameters + norms, (seed, layout["command"])
            taken += 1
    assert taken > least and not refused


@pytest.mark.parametrize(
    ("words", "why"),
    (
        ("--model qwen3-30b-a3b", "it has no heads of 128 channels where hidden / heads is 64"),
        ("--model gpt2-xl", "it has no MLPs of two matrices"),
        ("--model palm-540b --cluster h100:512", "no attention and MLP beside each other"),
        ("--cluster h100:16+a100:16@12.5e9", "it has no two sites with other numbers of layers"),
        ("--cluster tpu-v5p:64", "it has no TPUs"),
        (
            "--model mixtral-8x7b --optimizer muon",
            'it says: "--experts 8 are stacks, and --optimizer muon is for single matrices',
        ),
    ),
)
def test_where_there_is_no_command_the_answer_says_why(
    words: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = answer(capsys, *ASKED, *words.split())
    assert "there is no command of `train` for 1: " in said and why in said and "srun" not in said


# ---------------------------------------------------------------- what is shown


def test_the_layouts_that_are_shown_differ(capsys: pytest.CaptureFixture[str]) -> None:
    said = answer(capsys, "--model", "llama-70b", "--cluster", "h100:64", "--tokens", "1.4T")
    rows = re.findall(r"^(\d) ((?:tp|pp|cp|ep|dp)=.*?)  ", said, re.MULTILINE)
    axes = [frozenset(re.findall(r"(?:tp|pp|cp|ep|dp|zero|hsdp)=\d+", row)) for _, row in rows]
    assert [place for place, _ in rows] == ["1", "2", "3", "4", "5"] and len(set(axes)) == 5
    assert "\n    or tp=" in said  # a variant stands below the layout that it is one of
    assert (
        re.search(r"order: the axes from the outermost", said)
        and "resident: what the driver counts" in said
    )
    by_all = re.search(r"^  by all GPUs +([\d,.]+)", said, re.MULTILINE)
    a_gpu = re.search(r"^  tp +([\d,.]+)", said, re.MULTILINE)
    assert by_all and a_gpu and "," in by_all[1]
    assert float(by_all[1].replace(",", "")) > 60 * float(a_gpu[1].replace(",", ""))
    plain = answer(capsys, *ASKED, "--fixed", "tp=2", "--fixed", "pp=1")
    assert "order=" not in plain


def test_five_percent_of_the_memory_stay_free() -> None:
    run = Setup(model("llama-70b"), machine("h100:64"), 4096, 1024, fused_loss=True)
    full, spare = search(run), search(run, reserve=RESERVE)
    has = run.machine.device.memory
    assert max(sum(each.bytes.values()) for each in spare.found) <= 0.95 * has
    assert max(sum(each.bytes.values()) for each in full.found) > 0.95 * has
    assert (
        spare.refused["hold more than the 86 GB of a GPU, of which 5% stay free"]
        > full.refused["hold more than the 86 GB of a GPU"]
    )


def test_finalists_are_of_several_groups_and_every_group_is_sorted() -> None:
    run = Setup(model("llama-70b"), machine("h100:64"), 4096, 1024, fused_loss=True)
    groups = search(run).groups()
    assert len({shares(group[0].run) for group in groups}) == len(groups) > 5
    for group in groups[:5]:
        exact = sum(step(group[0].run, exact=True).values())
        assert group[0].seconds == pytest.approx(exact) and group[0].bytes == bytes_held(
            group[0].run
        )


def test_the_nearest_batch_is_named_where_none_divides(capsys: pytest.CaptureFixture[str]) -> None:
    """One that is further away than an eighth is named, and not planned."""
    words = ["--model", "llama-8b", "--cluster", "h100:64", "--fixed", "tp=1", "--fixed", "pp=1"]
    assert main([*words, "--batch", str(45 * 4096)]) == 2
    said = capsys.readouterr().err
    fix = re.search(r"the nearest batch that fits is 64 sequences: (--batch \d+)", said)
    assert fix and re.search(r"[;:] 0 ", said) is None  # a count of 0 is no reason
    assert main([*words, *fix[1].split()]) == 0
    with pytest.raises(PlanError, match="no layout fits 8 GPUs") as error:  # no batch would help
        search(Setup(model("llama-405b"), machine("h100:8"), 4096, 1024))
    assert "nearest batch" not in str(error.value) and "; 0 " not in str(error.value)


def test_what_is_recomputed_is_named() -> None:
    run = Setup(model("llama-8b"), machine("h100:8"), 4096, 64, dp=8)
    names = [name_of(replace(run, recompute=each)) for each in ("none", "full", "selective")]
    said = "dp=8 order=pp,dp,cp,tp"
    assert names == [
        f"{said} microbatch=1",
        f"{said} recompute microbatch=1",
        f"{said} recompute=selective microbatch=1",
    ]


# ---------------------------------------------------------------- the picture


@pytest.mark.parametrize("looks", (BYTES, STEP))
def test_no_two_kinds_look_alike(looks: dict[str, tuple[str, str]]) -> None:
    """In colour, and in grey print, where hatching helps."""
    for (one, (first, hatch)), (other, (second, hatched)) in combinations(looks.items(), 2):
        assert (
            sum((a - b) ** 2 for a, b in zip(to_rgb(first), to_rgb(second), strict=True)) > 0.02
        ), (one, other)
        grey = [
            0.299 * red + 0.587 * green + 0.114 * blue
            for red, green, blue in map(to_rgb, (first, second))
        ]
        assert abs(grey[0] - grey[1]) > 0.06 or hatch != hatched, (one, other)


def test_every_kind_has_a_look_of_its_own() -> None:
    run = Setup(model("llama-70b"), machine("h100:64"), 4096, 1024, tp=8, pp=2, dp=4)
    assert step(run).keys() <= STEP.keys() and bytes_held(run).keys() <= BYTES.keys()


def test_a_picture_needs_matplotlib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.png"
    assert main([*ASKED, "--picture", str(file)]) == 0 and file.stat().st_size > 10_000
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*ASKED, "--picture", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"plan: --picture {file} needs the library `matplotlib` (")
    assert (
        said.endswith("): pip install matplotlib, or leave --picture out\n")
        and said.count("\n") == 1
    )


# ---------------------------------------------------------------- words that are near


@pytest.mark.parametrize(
    ("words", "meant"),
    (
        ("plan --modle llama-8b", "--model"),
        ("plan --clustr h100:8", "--cluster"),
        ("plan --model llama-3-70b --cluster h100:8", "llama-70b"),
        ("plan --model llama-70b --cluster h10:8", "h100"),
        ("plan check --rosw x.json", "--rows"),
        ("launch --timout 3 x.py", "--timeout"),
        ("export runs/a --too there", "--to"),
        ("train --lerning-rate 3", "--lr"),
        ("train --weight-dcay 3", "--weight-decay"),
        ("bench all --ronds 3", "--rounds"),
        ("grade 02 --taks 1", "--task"),
        ("course build --studnt x", "--student"),
        ("plam", "plan"),
    ),
)
def test_what_is_misspelt_gets_the_nearest_name(
    words: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = minidist_main(words.split())
    except SystemExit as stopped:
        status = int(str(stopped.code))
    said = capsys.readouterr().err
    assert status == 2 and f"did you mean {meant}?" in said and said.count("\n") == 1


@pytest.mark.soak
def test_a_reader_that_has_seen_enough_is_no_fault() -> None:
    """`plan | head`: nothing is said of the pipe, and no traceback."""
    command = [
        sys.executable,
        "-m",
        "minidist",
        "plan",
        "--model",
        "llama-7b",
        "--cluster",
        "h100:8",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
        assert reader.stdout is not None and reader.stderr is not None
        reader.stdout.close()
        assert reader.stderr.read() == b""
    assert reader.returncode == 141, "as of a program that SIGPIPE ends"
