"""`picture`: two losses and the bytes of each stage, in words and as a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from training import TINY, metrics, train_on

import minidist
from minidist.__main__ import main
from minidist.cli.variants.compare import compare
from minidist.cli.variants.stages import stages


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `train --verify --metrics` and `stages --metrics` leave behind, as in `make demo`."""
    folder = tmp_path_factory.mktemp("demo")
    assert train_on(2, f"--steps 5 --verify --metrics {folder / 'new' / 'losses.jsonl'}") == 0
    words = [*TINY, "--steps", "2", "--metrics", str(folder / "new" / "stages.jsonl")]
    assert max(minidist.run(lambda comm: compare(words, comm, stages, "stages"), 2)) == 0
    return folder / "new"


def picture(folder: Path, to: Path) -> int:
    losses = [str(folder / "losses.jsonl"), str(folder / "losses.serial.jsonl")]
    return main(
        ["picture", "--losses", *losses, "--stages", str(folder / "stages.jsonl"), "--to", str(to)]
    )


def test_both_runs_and_every_stage_leave_their_numbers(measured: Path) -> None:
    ours, serial = metrics(measured / "losses.jsonl"), metrics(measured / "losses.serial.jsonl")
    assert [line["step"] for line in ours] == [line["step"] for line in serial] == [1, 2, 3, 4, 5]
    assert [line["loss"] for line in ours] == pytest.approx(
        [line["loss"] for line in serial], rel=1e-12
    )
    rows = {
        row["name"]: row
        for row in map(json.loads, (measured / "stages.jsonl").read_text().splitlines())
    }
    assert list(rows) == ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3, recompute full"]
    assert rows["ZeRO-1"]["held"]["optimizer"] < 0.6 * rows["DDP"]["held"]["optimizer"]
    assert rows["ZeRO-3"]["sent"]["dp"] > rows["DDP"]["sent"]["dp"]
    assert all(row["difference"] < 1e-9 for row in rows.values())


def test_a_picture_is_drawn_and_words_say_the_same(
    measured: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "new" / "demo.png"
    assert picture(measured, file) == 0
    out = capsys.readouterr().out
    assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 20_000
    last = metrics(measured / "losses.jsonl")[-1]["loss"]
    assert f"-> {last:.4f}, serial" in out and "they differ by at most" in out
    assert all(name in out for name in ("DDP ", "ZeRO-2 ", "at once")) and out.endswith(
        f"picture: {file}\n"
    )
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert picture(measured, file) == 0
    without = capsys.readouterr().out
    assert (
        without.splitlines()[:-1] == out.splitlines()[:-1] and "pip install matplotlib" in without
    )


def test_files_that_have_nothing_to_draw(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("losses.jsonl", "losses.serial.jsonl", "stages.jsonl"):
        (tmp_path / name).write_bytes((measured / name).read_bytes())
    for name, content, words in (
        ("losses.jsonl", "", "has no loss"),
        ("losses.jsonl", "[]\n", "must be a section"),
        ("stages.jsonl", "{", "is not JSON"),
        ("stages.jsonl", '{"name": "a", "held": {"parameters": -1}}', "must be 0 or more"),
    ):
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_text(content)
        assert picture(tmp_path, tmp_path / "a.png") == 2
        error = capsys.readouterr().err
        assert (
            words in error
            and error.startswith(f"minidist picture: {tmp_path / name} ")
            and error.count("\n") == 1
        )
        (tmp_path / name).write_bytes(before)
    assert picture(tmp_path, tmp_path / "a.nonsense") == 2
    assert "a.nonsense cannot be written" in capsys.readouterr().err
