"""Published rows: what each says is read, or leaves it out with the reason, and none ends the
report.
"""

from __future__ import annotations

import json
import math
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from minidist.cli.plan.command import main
from minidist.plan.device import Constants
from minidist.plan.published.check import check
from minidist.plan.published.fields import LeftOut, PublishedRow, read_config
from minidist.plan.published.rows import device_name, setup

ROWS: list[PublishedRow] = json.loads(
    (Path(__file__).parent / "published/rows.json").read_text(encoding="utf-8")
)
KNOWN = Constants.table()
MIXTURE: PublishedRow = {
    "arch": "llama-moe", "gpu": "H100", "hidden": 2048, "layers": 4, "heads": 32, "kv_heads": 4, "head_dim": 128,
    "ffn": 768, "vocab": 151936, "experts": 128, "top_k": 8, "shared": 1, "seq": 4096, "gpus": 16, "dp": 16, "ep": 8,
    "micro_batch": 1, "global_batch": 64, "zero": 1, "overlap_grad_reduce": False, "order": "[TP,CP,PP,DP]",
}  # fmt: skip
MEASURED: PublishedRow = {
    "id": "a mixture",
    "source": "nobody",
    "kind": "throughput",
    "measured": {"step_time_s": 1.5},
}
BAD: list[Any] = [
    "8",
    "",
    "x",
    "²",
    float("nan"),
    float("inf"),
    0,
    -1,
    1.5,
    10**30,
    [8],
    {"is": 8},
    True,
    None,
]


def row(**change: Any) -> PublishedRow:
    return MEASURED | {"config": MIXTURE | change}


def test_a_mixture_is_predicted_as_one() -> None:
    run = setup(row(), KNOWN)
    model = run.model
    assert (model.experts, model.top_k, model.shared, model.head_dim, run.ep) == (128, 8, 1, 128, 8)
    assert not run.software.overlap and run.order == ("dp", "pp", "cp", "tp")
    dense = setup(row(arch="llama", experts=0, top_k=0, shared=0, ep=1), KNOWN).model
    assert model.layer > 20 * dense.layer


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"gpu": "GB400"}, "the GPU 'GB400' is not in the table of devices"),
        ({"gpu": None}, "the GPU None is not in"),
        ({"gpu": "B200 (water cooled)"}, "cooled"),
        ({"layers_of_experts": 3}, "it has layers_of_experts, a field that no prediction reads"),
        ({"mla": "yes"}, "it has mla = 'yes', which must be"),
        ({"dense_layers": 1}, "1 dense layers lead those with experts: give experts and dense_ffn"),
        ({"micro_batch": 0}, "it has micro_batch = 0, which must be from 1 to"),
        ({"arch": "mamba"}, "the architecture 'mamba' is not known"),
        ({"arch": "llama"}, "the architecture 'llama' goes with experts = 128 in no model"),
        ({"precision": "int4"}, "the precision 'int4' is not known"),
        ({"precision": "nvfp4"}, "h100 has no products of 4 bits"),
        ({"recompute": "some"}, "recompute 'some' is not known"),
        ({"schedule": "v-half"}, "the schedule 'v-half' is not known"),
        ({"zero": "all"}, "zero 'all' is not known"),
        ({"ep": 32}, "ep=32 does not divide tp x dp x cp = 16"),
        ({"dp": 8}, "tp=1 x pp=1 x cp=1 x dp=8 is not 16 GPUs"),
        ({"top_k": 200}, "top_k=200 of 128 experts"),
        (
            {"pp": 2, "dp": 8, "virtual_pp": 2, "micro_batch": 8},
            "interleaved takes microbatches in groups of 2",
        ),
    ),
)
def test_what_is_not_known_leaves_a_row_out(change: PublishedRow, message: str) -> None:
    report = check([row(), row(**change), row()], KNOWN)
    assert len(report["rows"]) == 2 and message in report["left_out"][0]["why"]


def test_names_of_gpus_are_whole() -> None:
    names = (
        "A100-80GB",
        "a100_40gb",
        'A100 (paper: "NVIDIA Ampere")',
        "DGX-2 V100-32GB",
        "NVIDIA H100 SXM5",
        "h200",
    )
    expected = ["a100-80", "a100-40", "a100-80", "v100", "h100", "h200"]
    assert [device_name({"gpu": name}) for name in names] == expected


def test_every_field_of_the_rows_is_in_a_table() -> None:
    for each in ROWS:
        if (
            isinstance(each.get("config"), dict)
            and each["config"].get("hidden")
            and each["config"].get("gpu")
        ):
            read_config(each["config"])
    with pytest.raises(LeftOut, match="it has wheels, a field that no prediction reads"):
        read_config({"wheels": 4})


def spoiled(good: PublishedRow, generator: random.Random) -> Any:
    """Return a row in which one thing is wrong, or nearly all."""
    bad = deepcopy(good)
    where = generator.choice(["row", "config", "config", "config", "measured"])
    inside = bad if where == "row" else bad.get(where) or bad
    name, value = generator.choice([*inside]), generator.choice(BAD)
    inside[name] = value
    if generator.random() < 0.1:
        inside.pop(name)
    return bad if generator.random() < 0.95 else value


def test_one_bad_row_never_ends_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = random.Random(5)
    rows = [spoiled(generator.choice([*ROWS, row()]), generator) for _ in range(200)]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    assert main(["check", "--rows", str(path), "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["left_out"]) > 60 < len(report["rows"])
    assert all(
        0 < each[name] < math.inf for each in report["rows"] for name in ("predicted", "measured")
    )
    assert all(
        each["id"] and each["why"] and "\n" not in each["why"] for each in report["left_out"]
    )
    path.write_text(json.dumps(rows[:40]))
    assert main(["check", "--rows", str(path)]) == 0 and "are left out" in capsys.readouterr().out
    for text in ("{}", "null", "[1", "[" * 100_000):
        path.write_text(text)
        assert (
            main(["check", "--rows", str(path)]) == 2 and capsys.readouterr().err.count("\n") == 1
        )
