"""`python -m minidist train`: the same numbers from every launcher, strategy and number of ranks,
and what it says.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import clean_environment, mpirun, torchrun
from torch import nn
from training import PROGRAM, TINY, losses, metrics, short_text, train_on

from minidist.cli.train import main
from minidist.full import NaiveDataParallel, Parallel
from minidist.full.comm import Communicator
from minidist.full.data_axis import DataAxis
from minidist.full.launch.jobs import run_job
from minidist.full.model.moe.balance import Load
from minidist.full.replica import Replica
from minidist.full.trainer import loop, verify
from minidist.full.trainer.metrics import Reporter, StepMetrics
from minidist.further import Config, parse

STEP = re.compile(
    r"step 3/3  loss \d\.\d{4}  norm \d\.\d{2}  [\d,]+ tokens/s  left 0:00(  waiting \d+%)?"
    r"(\n    mfu \d+\.\d%)?"
)


# ---------------------------------------------------------------- parity


def test_every_launcher_trains_alike(tmp_path: Path) -> None:
    """The command as a user types it, with 1, 2 and 3 ranks on three wires; nothing on stderr but
    the launcher's.
    """
    tiny = ["train", *TINY, "--steps", "4", "--batch", "7", "--dropout", "0.1", "--verify"]
    files = {name: tmp_path / f"{name}.jsonl" for name in ("python", "mpirun", "torchrun")}
    with ThreadPoolExecutor(2) as pool:
        args = {name: [*tiny, "--metrics", str(file)] for name, file in files.items()}
        plain = [sys.executable, "-W", "default", "-m", "minidist", *args["python"]]
        jobs = {
            "python": pool.submit(
                run_job, plain, env=clean_environment(), timeout=100, capture=True
            ),
            "mpirun": pool.submit(mpirun, 3, PROGRAM, *args["mpirun"], timeout=100),
            "torchrun": pool.submit(torchrun, 2, PROGRAM, *args["torchrun"], timeout=100),
        }
        done = {name: job.result() for name, job in jobs.items()}
    serial = losses(files["python"])
    for name, ranks in (
        ("python", "1 rank on the threads wire"),
        ("mpirun", "3 ranks on the mpi"),
        ("torchrun", "2"),
    ):
        assert done[name].returncode == 0, (name, done[name].stderr)
        assert ranks in done[name].stdout and "serial run   yes" in done[name].stdout, done[
            name
        ].stdout
        assert [step for step, _ in losses(files[name])] == [1, 2, 3, 4]
        for (_, ours), (_, theirs) in zip(losses(files[name]), serial, strict=True):
            assert math.isclose(ours, theirs, rel_tol=1e-12), name
    assert done["python"].stderr == "" and done["mpirun"].stderr == ""


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, "--strategy ddp --bucket-mib 0.001"),
        (3, "--strategy naive --tied"),
        (3, "--strategy server --key-value-heads 1"),
        (4, "--strategy ddp --accumulate 2 --dropout 0.2 --tied --key-value-heads 1"),
        (3, "--batch 2 --dropout 0.2"),  # one rank has no rows
        (5, "--batch 7 --accumulate 3 --strategy naive"),  # microbatches of 1, 0 and 0 rows
        # padding; the last batch of the epoch is short
        (3, "--by-length --sequence 40 --dropout 0.1"),
        (2, "--clip 0 --weight-decay 0 --base-batch 4 --debug"),
    ],
)
def test_the_parameters_are_those_of_the_serial_run(
    ranks: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several epochs of a short text, in float64, compared by `--verify`."""
    text = short_text(tmp_path, 900)
    assert train_on(ranks, words, f"--text {text} --steps 12 --verify --lr 0.01") == 0
    said = capsys.readouterr()
    difference = re.search(
        r"same parameters as the serial run   yes: largest relative difference (\S+)", said.out
    )
    assert difference and float(difference[1]) < 1e-9
    assert "same bits on every rank             yes" in said.out and "in float64" in said.out
    assert said.err == ""


Broken = Callable[[nn.Module, Communicator], Replica]


class NeverReduced(NaiveDataParallel):
    """Forgets to communicate: every rank goes its own way."""

    def synchronize(self) -> None:
        pass


class WrongLater(NaiveDataParallel):
    """Is right at first."""

    steps = 0

    def synchronize(self) -> None:
        super().synchronize()
        self.steps += 1
        if self.steps == 3:
            self.module.zero_grad()


def forgotten(model: nn.Module, comm: Communicator) -> Replica:
    return NeverReduced(model, comm, op="sum")


def averaged(model: nn.Module, comm: Communicator) -> Replica:
    return NaiveDataParallel(model, comm, op="mean")


def later(model: nn.Module, comm: Communicator) -> Replica:
    return WrongLater(model, comm, op="sum")


def reduce_by(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the data axis reduce gradients in a broken way."""

    def apply(self: DataAxis, parallel: Parallel, checked: None) -> None:
        parallel.replica = broken(parallel.model, parallel.mesh.data)

    monkeypatch.setattr(DataAxis, "apply", apply)


@pytest.mark.parametrize("precision", ["", "--precision float32"])
@pytest.mark.parametrize(
    ("broken", "alike"), [(forgotten, "NO"), (averaged, "yes"), (later, "yes")]
)
def test_verify_finds_wrong_gradients(
    broken: Broken,
    alike: str,
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wrong, and the same on all ranks or not; clipped to a norm, so that Adam does not even see
    the factor.
    """
    reduce_by(broken, monkeypatch)
    assert train_on(2, "--steps 4 --clip 0.01 --verify", precision) == 1
    table = capsys.readouterr().out
    assert "same parameters as the serial run   NO" in table
    assert f"same bits on every rank             {alike}" in table


def test_a_rank_that_went_astray_fails_a_run_that_nobody_verifies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reduce_by(forgotten, monkeypatch)
    assert train_on(2, "--steps 2") == 1


@pytest.mark.parametrize("ranks", [1, 3])
def test_lower_precision_is_judged_by_its_own_rounding(
    ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_on(ranks, "--steps 20 --precision float32 --verify") == 0
    table = capsys.readouterr().out
    assert (
        "at most twice that of the serial float32 run" in table
        and "in float32" in table.splitlines()[0]
    )


@pytest.mark.parametrize(
    ("steps", "turned", "same"),
    [
        (1, 5, True),
        (1, 50, False),
        (9, 100, True),
        (9, 500, False),
        (100, 1000, True),
        (100, 1500, False),
    ],
)
def test_a_few_signs_that_rounding_turns_are_no_fault(
    steps: int, turned: int, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in the serial run and more in ours: Adam moves each by 2 lr in a step."""
    config = parse([*TINY, "--precision", "autocast-bfloat16", "--lr", "1e-3"])
    history = [StepMetrics(step + 1, 1.0, 1.0, 1e-3, 1.0, 1.0, 0.0) for step in range(steps)]

    def outcome(turned: int) -> loop.Outcome:
        model = nn.Linear(100, 100, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.1).view(-1)[:turned] += 2e-3
        return loop.Outcome(model, history, {})  # type: ignore[arg-type]

    def serial(config: Config, *_: object) -> loop.Outcome:
        return outcome(0 if config.precision == "float64" else 1)

    monkeypatch.setattr(verify, "serial_run", serial)
    nothing: Any = None
    assert verify.compare(config, nothing, 256, outcome(turned)).same == same


def test_not_a_number_is_no_agreement() -> None:
    ours, serial = torch.tensor([1.0, math.nan]), torch.tensor([1.0, 2.0])
    assert verify._relative(ours, serial) == verify._relative(serial, ours) == math.inf
    assert verify._relative(serial, serial) == 0


# ---------------------------------------------------------------- what it says


def test_metrics_and_the_line_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "metrics.jsonl"
    assert (
        train_on(2, f"--steps 3 --batch 7 --lr 0.01 --warmup 2 --peak-tflops 0.5 --metrics {file}")
        == 0
    )
    printed = re.findall(r"^step .*(?:\n    .*)?", capsys.readouterr().out, re.M)
    assert len(printed) == 3 and STEP.fullmatch(printed[2]) and "mfu" in printed[2]
    recorded = metrics(file)
    assert [line["step"] for line in recorded] == [1, 2, 3]
    assert [line["learning_rate"] for line in recorded] == pytest.approx([0.005, 0.01, 0.001])
    parameters = 16 * 256 * 2 + (4 * 16 * 16 + 3 * 16 * 48 + 3 * 16)
    flops = 6 * (parameters - 256 * 16) + 12 * 16 * 16
    for line in recorded:
        assert list(line) == list(StepMetrics.__dataclass_fields__)
        assert (
            0 < line["loss"] < 6 and line["gradient_norm"] > 0 and 0 <= line["communication"] <= 1
        )
        assert line["tokens_per_second"] == pytest.approx(7 * 16 / line["seconds"])
        assert line["utilisation"] == pytest.approx(
            flops * line["tokens_per_second"] / (2 * 0.5e12)
        )


def test_utilisation_is_left_out_where_the_peak_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_on(1, f"--steps 3 --metrics {tmp_path / 'm'}") == 0
    assert metrics(tmp_path / "m")[0]["utilisation"] is None
    printed = [line for line in capsys.readouterr().out.splitlines() if STEP.fullmatch(line)]
    assert len(printed) == 1 and "mfu" not in printed[0]


def test_time_left_counts_the_steps_of_this_start(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(steps=130, file=None, first_step=100, every=1)
    reporter.started -= 20.0  # ten steps took twenty seconds, so twenty more take forty
    reporter.step(StepMetrics(110, 1.0, 1.0, 1e-3, 2.0, 100.0, 0.5))
    assert re.search(r"step 110/130 .* left 0:40  waiting 50%$", capsys.readouterr().out)


def test_metrics_that_the_disk_has_no_room_for_do_not_end_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, text: str) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "m").write_text('{"step": 1}\n')
    monkeypatch.setattr(Path, "write_text", full)
    Reporter(3, tmp_path / "m", 1).step(StepMetrics(2, 1.0, 1.0, 1e-3, 1.0, 1.0, 0.0))
    assert capsys.readouterr().err.endswith("(No space left on device): going on without\n")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert (tmp_path / "m").read_text() == '{"step": 1}\n'


@pytest.mark.parametrize(
    ("steps", "lines"), [(1, 1), (40, 40), (41, 21), (1000, 40), (999_999, 40)]
)
def test_some_forty_lines_whatever_the_number_of_steps(
    steps: int, lines: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each in 80 columns, whatever stands in it; the last step is among them, and programs get
    every step.
    """
    few = range(1, steps + 1) if steps <= 1000 else [*range(25_000, steps, 25_000), steps]
    reporter = Reporter(steps, tmp_path / "m", 0, label="serial ")
    everything = (0.123, Load(12.34, 123_456, 12.34), 0.12, 0.12, 1.5)
    for step in few:
        reporter.step(
            StepMetrics(step, 10.12345, 1234.5678, 1e-3, 2.0, 12_345_678.0, 0.5, *everything)
        )
    out = capsys.readouterr().out.splitlines()
    printed = [line for line in out if line.startswith("serial step ") and "  norm " in line]
    assert len(printed) == lines and f"step {steps}/{steps}" in printed[-1]
    assert max(map(len, out)) <= 80
    assert [line["step"] for line in metrics(tmp_path / "m")] == [*few]


def test_log_every_says_how_often_to_print(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_on(2, f"--steps 7 --log-every 3 --metrics {tmp_path / 'm'}") == 0
    assert re.findall(r"^step (\d)/7", capsys.readouterr().out, re.M) == ["3", "6", "7"]
    assert len(metrics(tmp_path / "m")) == 7


def test_on_a_terminal_the_line_stays_in_place() -> None:
    """Nothing of a longer line is left behind a shorter one; what was measured stays above."""
    leader, follower = os.openpty()
    command = ["train", *TINY, "--steps", "30", "--eval-every", "20"]
    job = subprocess.Popen(
        [sys.executable, "-m", "minidist", *command], stdout=follower, env=clean_environment()
    )
    os.close(follower)
    seen = b""
    with contextlib.suppress(OSError):  # Linux says so at its end
        while block := os.read(leader, 1 << 16):
            seen += block
    os.close(leader)
    assert job.wait(60) == 0
    steps = seen.decode().partition("\r\n")[2].partition("\r\n\r\n")[0]
    drawn = [line for line in steps.split("\r") if line.strip()]
    assert len(drawn) == 32 and all(len(line.rstrip("\n")) <= 79 for line in drawn)
    assert len({len(line.strip("\n")) for line in drawn[:-1]}) == 1
    assert steps.count("\n") == 2 and "step 20/30  loss on held-out text" in steps


@pytest.mark.parametrize(
    ("words", "rates"),
    [
        ("wsd --cooldown 2", [0.01, 0.01, 0.01, 0.0055, 0.001]),
        ("wsd", [0.01, 0.01, 0.01, 0.01, 0.001]),  # a fifth of the steps
        ("linear", [0.01, 0.00775, 0.0055, 0.00325, 0.001]),
        ("constant", [0.01] * 5),
    ],
)
def test_the_rate_goes_on_as_it_was_told_to(words: str, rates: list[float], tmp_path: Path) -> None:
    told = f"--steps 5 --warmup 1 --lr 0.01 --lr-schedule {words} --metrics {tmp_path / 'm'}"
    assert train_on(1, told) == 0
    assert [line["learning_rate"] for line in metrics(tmp_path / "m")] == pytest.approx(rates)


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    Reporter(3, tmp_path / "m", 0).step(StepMetrics(1, math.nan, math.inf, 1e-3, 1.0, 1.0, 0.0))
    line = metrics(tmp_path / "m")[0]
    assert (
        line["loss"] is None
        and line["gradient_norm"] is None
        and "NaN" not in (tmp_path / "m").read_text()
    )


def test_a_full_disk_costs_the_metrics_and_not_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    assert train_on(2, "--steps 2 --metrics /dev/full") == 0
    assert capsys.readouterr().err.count("takes no more metrics (No space left on device)") == 1


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, ""),
        (3, "--accumulate 2"),
        (3, "--zero 1"),
        (2, "--zero 2"),
        (3, "--zero 3"),
        (4, "--zero 3 --hsdp 2"),
    ],
)
def test_bytes_sent_are_those_of_the_formula(
    ranks: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_on(ranks, "--steps 3", words) == 0
    rows = dict(
        re.findall(
            r"^ *(bytes of gradients(?: and parameters)? sent by rank 0|[^ ].* x steps) +([\d,]+)$",
            capsys.readouterr().out,
            re.M,
        )
    )
    counted, formula = (int(number.replace(",", "")) for number in rows.values())
    # the parts of a ring differ by an element
    assert counted == pytest.approx(formula, rel=1e-3) and counted > 0


def test_a_trace_of_all_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_on(3, f"--steps 2 --trace {tmp_path / 'trace.json'}") == 0
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {entry["pid"] for entry in entries if entry["ph"] == "X"} == {0, 1, 2}
    assert {"forward", "backward", "optimizer"} <= {entry["name"] for entry in entries}
    said = capsys.readouterr().out
    assert said.count("trace written to") == 1 and re.search(r"^rank +total", said, re.M)


@pytest.mark.parametrize(
    "words", ["--held-out 0", "--held-out 0.5", "--by-length --held-out 0", "--sequence 4"]
)
def test_a_sample_is_written_whatever_is_held_out(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin1").write_bytes(
        "Ein größeres Gerät läßt sich öffnen.\n\n".encode("latin-1") * 40
    )
    assert train_on(2, words, f"--steps 2 --sample 6 --text {tmp_path / 'latin1'}") == 0
    assert re.search(r"the model was given '.+' and wrote:\n.", capsys.readouterr().out)


# ---------------------------------------------------------------- what it leaves behind


def test_no_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    assert main([*TINY, "--steps", "2"]) == 0
    assert set(threading.enumerate()) <= before  # those of earlier tests may end
    monkeypatch.setattr(loop.Trainer, "step", broken_step)
    with pytest.raises(ValueError):
        main([*TINY, "--steps", "2"])
    assert set(threading.enumerate()) <= before  # those of earlier tests may end


def broken_step(self: object, step: int, *rest: object) -> tuple[float, float]:
    raise ValueError("a bug, deep in the code")


def test_a_bug_is_not_taken_for_a_mistake_of_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop.Trainer, "step", broken_step)
    with pytest.raises(ValueError, match="a bug"):
        main([*TINY, "--steps", "2"])
    assert "minidist train" not in capsys.readouterr().err


def test_ctrl_c_on_one_rank_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> tuple[float, float]:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop.Trainer, "step", interrupted)
    assert main([*TINY, "--steps", "2"]) == 130
    assert capsys.readouterr().err == "minidist train: interrupted\n"


@pytest.mark.parametrize("zero", ("1", "2", "3"))
def test_zero_equals_the_serial_run_and_goes_on_from_any_checkpoint(
    zero: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    saved = f"--steps 6 --verify --accumulate 2 --save {folder} --save-every 2 --keep 9"
    assert train_on(3, f"{saved} --zero {zero}") == 0
    # each goes on from what the one before it wrote
    for ranks, stage in ((2, 0), (3, int(zero)), (1, 0)):
        shutil.rmtree(folder / "step-00000006")
        assert train_on(ranks, f"{saved} --resume --zero {stage}") == 0
        shutil.rmtree(folder / "step-00000004", ignore_errors=True)
    assert "NO" not in capsys.readouterr().out
    assert train_on(2, f"--steps 2 --strategy naive --zero {zero}") == 2
    assert "is for runs with --strategy ddp: add that" in capsys.readouterr().err
