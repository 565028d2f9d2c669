"""A job on the GPU loses a rank, and goes on by itself: it ends with the numbers of an unbroken run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from jobs import CPU, job, succeeds
from training import DEADLY, DEADLY_MEMBER, TINY, losses, tensors

from minidist.full.comm.torch_wire.stalls import Stalls

STEPS = 8
RUN = f"--precision float64 --lr 0.01 --steps {STEPS} --save-every 2 --sample 0"


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("spares", ["0", "1"])
def test_a_job_goes_on_when_a_rank_is_killed(spares: str, tmp_path: Path) -> None:
    """On one rank less, which then accumulates, and on a spare."""
    program = tmp_path / "deadly.py"
    program.write_text(DEADLY)
    words = [*TINY, *shlex.split(RUN)]
    calm, broken = tmp_path / "calm", tmp_path / "broken"
    succeeds(1, "-m", "minidist", "train", *words, "--save", str(calm), timeout=120)
    options = ["--max-restarts", "1", "--spares", spares]
    done = job(2, program, *words, "--save", str(broken), timeout=200, options=options)
    assert done.returncode == 0, done.stderr
    assert f"restart 1 of at most 1, {1 + int(spares)} ranks" in done.stderr
    assert "resumed after step" in done.stdout
    compare(calm, broken)


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("died", ["SIGKILL", "SIGSTOP"])
def test_a_member_is_replaced_while_the_other_waits(died: str, tmp_path: Path) -> None:
    """The other's kernels wait on the GPU for one that has died, or hangs, and are aborted."""
    program = tmp_path / "deadly.py"
    program.write_text(DEADLY_MEMBER.format(signal=died))
    words = [*TINY, *shlex.split(RUN)]
    calm, broken = tmp_path / "calm", tmp_path / "broken"
    succeeds(1, "-m", "minidist", "train", *words, "--save", str(calm), timeout=120)
    options = ["--replace", "--max-restarts", "1", "--min-ranks", "2"]
    done = job(2, program, *words, "--save", str(broken), timeout=200, limit=15, options=options)
    assert done.returncode == 0, done.stderr
    assert "view 2: 2 ranks go on after step 2" in done.stdout
    compare(calm, broken)


@pytest.mark.gpu
@pytest.mark.skipif(CPU, reason="streams of a GPU")
def test_waiting_for_another_stream_is_no_computing() -> None:
    """Kernels of the stream that computes count; what it waits for on another one does not."""
    stalls, beside = Stalls(), torch.cuda.Stream()
    busy = 200_000_000  # cycles, some tenth of a second
    torch.cuda._sleep(busy)  # its clock goes up
    torch.cuda.synchronize()
    stalls.begin()
    torch.cuda._sleep(busy)
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        with stalls.one():  # of a stream that nobody watches
            torch.cuda._sleep(3 * busy)
        done = beside.record_event()
    with stalls.one():
        torch.cuda.current_stream().wait_event(done)
    computed, stood = stalls.computed(), stalls.end()
    assert 2.5 < stood / computed < 3.5


def compare(calm: Path, broken: Path) -> None:
    """Compare the losses and the last weights of two runs."""
    ours, theirs = (losses(run / "metrics.jsonl") for run in (broken, calm))
    assert [step for step, _ in ours] == list(range(1, STEPS + 1))
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=1e-9)
    last = f"step-{STEPS:08}"
    expected, found = tensors(calm / last), tensors(broken / last)
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-9, atol=1e-12), name
