"""The check before a start names the rank that is not fit, and nobody else."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from ranks import mpirun

from minidist import run
from minidist.full.launch import health
from minidist.full.launch.health import Checked, check, judge

FIT = Checked("node1", 64e9, 0.010, 0.002, 0.1, ())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"product": 0.025}, "its product takes 2.5 times as long as the median of 10.0 ms"),
        ({"ring": 0.01}, "its ring takes 5.0 times as long"),
        ({"disk": 0.5}, "its disk takes 5.0 times as long"),
        ({"free": 20e9}, "20.0 GB of memory are free, of usually 64.0"),
        ({"faults": ("no room",), "disk": None}, "no room"),
    ],
)
def test_one_rank_is_named(changed: dict[str, object], words: str) -> None:
    for ranks in (2, 3, 8):
        all = [FIT] * ranks
        all[1] = FIT._replace(host="node2", **changed)  # type: ignore[arg-type]
        assert judge(all) == [f"rank 1 on node2: {words}"] or words in judge(all)[0]
        assert len(judge(all)) == 1
    assert judge([FIT] * 4) == []


def test_of_two_machines_the_slow_one_is_named() -> None:
    slow = FIT._replace(host="node2", product=0.1, free=20e9)
    found = judge([FIT] * 4 + [slow] * 4)
    assert [line.partition(":")[0] for line in found] == [f"rank {n} on node2" for n in range(4, 8)]
    assert all("its product takes 10.0 times" in line and "20.0 GB" in line for line in found)


def test_a_wrong_product_and_a_broken_wire_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply = health._product

    def wrong() -> float:
        if threading.current_thread().name == "rank 2":
            raise ArithmeticError("its product of two matrices is wrong in 3 places")
        return multiply()

    monkeypatch.setattr(health, "_product", wrong)
    monkeypatch.setattr(health, "SLOW", 1e9)
    found = run(lambda comm: check(comm, str(tmp_path)), 4)
    assert all(len(lines) == 1 and "rank 2 on" in lines[0] for lines in found)
    assert "wrong in 3 places" in found[0][0]
    monkeypatch.undo()
    monkeypatch.setattr(health, "SLOW", 1e9)
    monkeypatch.setattr(health.np, "array_equal", lambda *_: False)
    assert "its product of two matrices is wrong" in run(lambda comm: check(comm), 1)[0][0]


def test_a_folder_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = run(lambda comm: check(comm, str(tmp_path / "file")), 2)
    assert len(found[0]) == 2 and all("file" in line for line in found[0])


def test_the_command_on_real_ranks(tmp_path: Path) -> None:
    program = """
import sys
from minidist.full.launch import health
health.SLOW = 1e9
sys.exit(health.main(sys.argv[1:]))
"""
    done = mpirun(2, program, "--save", str(tmp_path / "run"))
    assert (done.returncode, done.stdout) == (0, "2 ranks are fit\n"), done.stderr
    (tmp_path / "file").write_text("")
    done = mpirun(2, program, "--save", str(tmp_path / "file"))
    assert done.returncode != 0 and done.stdout.count("rank ") == 2
