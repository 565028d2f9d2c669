"""`python -m minidist bench`: tiny sizes from end to end, formulas, bounds. Never how long anything took."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import clean_environment

from minidist.cli.bench import main
from minidist.cli.bench.bounds import BOUNDS
from minidist.cli.bench.measure import BUS_FACTORS, Measurement
from minidist.cli.bench.options import COLLECTIVES, NAMES, parse, size_text
from minidist.cli.bench.probe import state
from minidist.cli.bench.report import PEERS, Results, quantity


def bench(*arguments: str) -> dict[str, Any]:
    """Run a bench as a user would, and return its JSON."""
    command = [sys.executable, "-m", "minidist", "bench", *arguments, "--json", "-"]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def names(found: dict[str, Any], launch: str = "shipped") -> set[tuple[str, str, str]]:
    """Return which competitors were measured, but for the probe."""
    rows = [row for row in found["results"] if row["launch"] == launch and row["bench"] != "copy"]
    return {(row["bench"], row["case"], row["competitor"]) for row in rows}


# ---------------------------------------------------------------- from end to end


def test_all_reduce_with_every_peer() -> None:
    found = bench("all-reduce", "--sizes", "4KiB", "--rounds", "3", "--algorithms", "auto,registered,ring")
    ours = {("all_reduce", "4 KiB", name) for name in ("auto", "registered", "ring", "native")}
    assert names(found) == ours | {("all_reduce", "4 KiB", "gloo")}
    assert names(found, "tuned") == ours
    auto = next(row for row in found["results"] if (row["competitor"], row["launch"]) == ("auto", "shipped"))
    assert len(auto["values"]) == 3 and min(auto["values"]) > 0
    assert auto["lower_quartile"] <= auto["median"] <= auto["upper_quartile"]
    assert auto["bus_bandwidth"] == pytest.approx(4096 / auto["median"])  # 2 (P - 1)/P = 1 for two ranks
    assert set(auto["ratios"]) == {"native", "gloo"} and min(auto["ratios"].values()) > 0
    assert {(b["competitor"], b["peer"]) for b in found["bounds"]} == {("auto", "native"), ("auto", "gloo")}
    assert set(found["states"]) == {f"{launch} {when}" for launch in ("shipped", "tuned") for when in ("before", "after")}
    assert found["machine"]["cores"] >= 1 and found["machine"]["mpi"] and found["machine"]["torch"]


def test_ddp_beside_torch_and_what_communicates_nothing() -> None:
    found = bench("ddp", "--hidden", "16", "--rounds", "2")
    competitors = {"local", "DDP", "naive", "torch DDP"}
    assert names(found) == {("ddp", case, c) for case in ("D=16, 8 x 128", "D=16, 1 x 64") for c in competitors}
    overlapped = next(row for row in found["results"] if row["competitor"] == "DDP")
    assert set(overlapped["ratios"]) == {"local", "torch DDP"}


def test_all_at_once(tmp_path: Path) -> None:
    """Every bench but those with torch in it, on three ranks; the table goes to standard output, the rest to a file."""
    file = tmp_path / "found.json"
    small = ["--ranks", "3", "--sizes", "100,3KiB", "--rounds", "1", "--peers", "native", "--json", str(file)]
    for name in ("p2p", *COLLECTIVES[1:3]):
        command = [sys.executable, "-m", "minidist", "bench", name, *small]
        done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        found = json.loads(file.read_text())
        ours = "send" if name == "p2p" else "auto"
        sizes = ["8 B", "100 B", "3 KiB"] if name == "p2p" else ["96 B", "3 KiB"]  # a multiple of 3 floats
        assert names(found) == {(name, size, who) for size in sizes for who in (ours, "native")}
        assert f"{name}, 3 ranks" in done.stdout and "other core" in done.stdout
        assert not found["bounds"], "the bounds are for two ranks"
