"""`stages` and `layouts`: one run in several variants; each holds what it should, and all end as a
serial run does.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from ranks import mpirun
from training import PROGRAM, TINY
from training import metrics as read_metrics

import minidist
from minidist.__main__ import main
from minidist.cli.together import stopping_together
from minidist.cli.variants.compare import Variants, compare
from minidist.cli.variants.layouts import layouts
from minidist.cli.variants.stages import stages

UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
COLUMNS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "at once",
    "sent",
)


def compared(variants: Variants, ranks: int, *words: str) -> int:
    """Run on threads; return the status that the job would have."""
    argv = [*TINY, *shlex.split(" ".join(words))]
    return max(
        minidist.run(
            lambda comm: stopping_together(
                "stages", comm, lambda: compare(argv, comm, variants, "stages")
            ),
            ranks,
        )
    )


def rows_of(out: str, columns: Sequence[str], *beginnings: str) -> dict[str, dict[str, float]]:
    """Return the sizes in a printed table, by row and column."""
    rows: dict[str, dict[str, float]] = {}
    for line in out.splitlines():
        if line.startswith(beginnings):
            name, _, rest = line.partition("  ")
            sizes = [
                float(number) * UNITS[unit]
                for number, unit in re.findall(r"([\d.]+) (B|KiB|MiB)", rest)
            ]
            rows[name] = dict(zip(columns, sizes, strict=True))
    return rows


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(stages, 4, "--layers 4 --steps 2 --hidden 28") == 0
    rows = rows_of(capsys.readouterr().out, COLUMNS, "DDP", "ZeRO")
    ddp, one, two, three, groups, recomputed = rows.values()
    assert one["optimizer"] == pytest.approx(ddp["optimizer"] / 4, rel=0.02) == two["optimizer"]
    assert groups["optimizer"] == pytest.approx(ddp["optimizer"] / 2, rel=0.02)
    assert two["gradients"] < one["gradients"]
    assert (
        three["parameters"]
        < groups["parameters"]
        < ddp["parameters"]
        == one["parameters"]
        == two["parameters"]
    )
    assert recomputed["activations"] < three["activations"] / 2
    assert (
        ddp["sent"]
        == one["sent"]
        == two["sent"]
        < groups["sent"]
        < three["sent"]
        < 1.5 * ddp["sent"]
    )


@pytest.mark.soak
def test_what_muon_sends_and_holds(tmp_path: Path) -> None:
    """Beside AdamW: one momentum in place of two moments, and the way of each matrix to its owner
    and back.
    """
    found = {}
    for name in ("adamw", "muon"):
        file = tmp_path / name
        words = f"--layers 2 --steps 2 --hidden 28 --optimizer {name} --metrics {file}"
        assert compared(stages, 4, words) == 0
        found[name] = {row["name"]: row for row in read_metrics(file)}
    matrices = 2 * 8 * (4 * 28 * 28 + 3 * 28 * 80)  # bytes of both layers'
    for name, row in found["muon"].items():
        plain, ours = found["adamw"][name], row["muon"]
        assert "muon" not in plain
        assert ours["counted"] == ours["formula"]
        assert (ours["counted"] == 0) == (name == "DDP")
        if "groups" not in name:
            assert ours["counted"] <= 2 * matrices
        # what the rank with the most sends more is at most what all send more
        more = row["sent"]["dp"] - plain["sent"]["dp"]
        assert ours["counted"] / 4 <= more <= ours["counted"]
    less = found["adamw"]["DDP"]["held"]["optimizer"] - found["muon"]["DDP"]["held"]["optimizer"]
    assert less == matrices + 4 * 2 * 7  # AdamW counts the steps of each, too


@pytest.mark.soak
def test_muon_gathers_blocks_along_tp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--layers 2 --steps 1 --hidden 32 --heads 2 --optimizer muon --metrics {tmp_path}/a"
    assert compared(layouts, 4, words) == 0
    assert "Muon sends" in capsys.readouterr().out
    ours = {row["name"]: row["muon"] for row in read_metrics(tmp_path / "a")}
    assert all(each["counted"] == each["formula"] for each in ours.values())
    assert ours["dp=4"]["counted"] == ours["dp=2 pp=2"]["counted"] == 0
    # each of two replicas gathers all blocks: (T - 1) n
    matrices = 2 * 8 * (4 * 32 * 32 + 3 * 32 * 96)
    assert ours["dp=2 tp=2"]["counted"] == 2 * matrices == 2 * ours["pp=2 tp=2"]["counted"]


def test_under_mpirun() -> None:
    job = mpirun(2, PROGRAM, "stages", *TINY, "--steps", "2", timeout=100)
    assert job.returncode == 0, job.stderr
    # which would be of one rank each
    assert "ZeRO-3, recompute full" in job.stdout and "in groups" not in job.stdout


def test_bad_input_gets_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(stages, 2, "--dp 3") == 2
    assert (
        capsys.readouterr().err
        == "minidist stages: dp = 3, but 2 ranks were started: use mpirun -n 3, or --dp 2\n"
    )


def test_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    """Two ranks that share matrices or layers hold half; along dp goes the gradient of what is
    held.
    """
    assert compared(layouts, 4, "--layers 4 --steps 2 --hidden 32 --heads 2 --tied") == 0
    columns = (*COLUMNS[:-1], "dp", "pp", "tp")
    rows = rows_of(capsys.readouterr().out, columns, "dp=", "pp=")
    assert list(rows) == [
        "dp=4",
        "dp=2 tp=2",
        "pp=2 tp=2",
        "pp=2 tp=2, sequence parallel",
        "dp=2 pp=2",
    ]
    alone, tensor, both, sequence, pipeline = rows.values()
    assert tensor["parameters"] == pytest.approx(alone["parameters"] / 2, rel=0.02)
    # tied: both stages have a matrix
    assert alone["parameters"] / 4 < both["parameters"] < 0.4 * alone["parameters"]
    assert alone["tp"] == alone["pp"] == tensor["pp"] == pipeline["tp"] == both["dp"] == 0
    # 2 (P - 1)/P: 3/2 n of four ranks, n/2 of two
    assert tensor["dp"] == pytest.approx(alone["dp"] / 3, rel=0.02)
    # of the batch; and what the first and last stage share
    activations, embedding = 8 * 16 * 32 * 8, 256 * 32 * 8
    assert (
        both["pp"] == activations + embedding / 2 and pipeline["pp"] == activations / 2 + embedding
    )
    assert sequence["pp"] == activations / 2 + embedding / 2 and sequence["tp"] == pytest.approx(
        both["tp"], rel=0.1
    )
    assert sequence["activations"] < both["activations"] < alone["activations"]


def test_of_unequal_stages_the_larger_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(layouts, 2, "--layers 3 --steps 1 --hidden 32 --heads 2") == 0
    rows = rows_of(capsys.readouterr().out, (*COLUMNS[:-1], "dp", "pp", "tp"), "dp=", "tp=", "pp=")
    assert (
        0.6 * rows["dp=2"]["parameters"] < rows["pp=2"]["parameters"] < rows["dp=2"]["parameters"]
    )


def test_one_rank_has_no_two_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert compared(layouts, 3) == 2
    assert "3 ranks cannot be laid out in two ways: use mpirun -n 4" in capsys.readouterr().err


def test_nothing_is_saved_whatever_the_options_say(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    assert (
        compared(
            layouts,
            2,
            f"--layers 2 --steps 1 --save {folder} --save-every 1 --keep 3 --keep-every 2 --mtbf 1",
        )
        == 0
    )
    assert not folder.exists()


@pytest.mark.parametrize("command", ["stages", "layouts", "losses"])
def test_the_help_is_of_the_command_that_was_asked(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m minidist {command} [")
