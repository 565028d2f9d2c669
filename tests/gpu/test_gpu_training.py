"""`train --verify` on 1, 2 and 4 ranks, with layouts and options that are drawn; each prints its
seed.
"""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest
import torch
from jobs import DRAWS, HERE, PARTS, RIGHT, verified
from ranks import clean_environment, torchrun, warm_python
from train_draws import VERDICTS, draw, is_right

from minidist.full.launch.jobs import run_job
from minidist.full.pipeline import NAMES

COUNTS = {1: 8, 2: 28, 4: 20}  # of seeds on so many ranks


@pytest.mark.gpu
@pytest.mark.timeout(430)
@pytest.mark.parametrize("ranks", COUNTS)
def test_random_layouts_and_options_train_what_the_serial_run_does(ranks: int) -> None:
    verified(ranks, COUNTS[ranks], "0", str(COUNTS[ranks]), timeout=400)


EXPERTS = "--layers 2 --heads 2 --batch 8 --experts 6 --intermediate 16"
SHARED_OUT = (
    "--ep 2 --balance bias --capacity 1.25 --shared-experts 1",
    "--ep 2 --zero 3 --balance aux --precision bfloat16",
    "--pp 2 --schedule zb-h1 --microbatches 4",
    "--tp 2 --sp --precision float16 --balance aux",
    "--cp 2 --ep 2 --scores sigmoid",
    "--cp 2 --ep 2 --recompute full",
)


@pytest.mark.gpu
@pytest.mark.timeout(230)
def test_experts_and_context_train_what_the_serial_run_does() -> None:
    runs = [f"{EXPERTS} {words}" for words in SHARED_OUT]
    verified(2, len(runs), *runs, timeout=200)


def test_the_draws_have_every_option() -> None:
    drawn = {
        ranks: [" ".join(draw(seed, ranks)) for seed in range(count)]
        for ranks, count in COUNTS.items()
    }
    policies = [
        f"--recompute {policy}" for policy in ("none", "full", "selective", "sqrt", "every 2")
    ]
    precisions = [
        f"--precision {name}" for name in ("float64", "float32", "bfloat16", "float16", "fp8")
    ]
    stages = [f"--zero {stage}" for stage in (1, 2, 3)]
    for words in (*policies, *precisions, *stages, "--offload memory", "--tied", "--dropout 0.1"):
        assert all(any(words in line for line in lines) for lines in drawn.values()), words
    for words in ("--sp", *(f"--schedule {name} " for name in NAMES)):
        assert all(any(words in line for line in drawn[ranks]) for ranks in (2, 4)), words
    for words in (
        "--hsdp 2",
        "--hsdp 1",
        "--strategy naive",
        "--strategy server",
        "--bucket-mib",
        "--key-value",
    ):
        assert any(words in line for lines in drawn.values() for line in lines), words


def test_a_draw_on_gloo_trains_what_the_serial_run_does() -> None:
    job = torchrun(2, DRAWS, "7", "1", timeout=100)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count(RIGHT) == job.stdout.count(", gloo: train") == 1


BARE = """
import sys
import pytest
for name in ("hypothesis", "pytest_timeout", "xdist", "mpi4py", "matplotlib", "nbformat", "tokenizers"):
    sys.modules[name] = None
sys.exit(pytest.main(["-m", "gpu", "--collect-only", "-q", sys.argv[1]]))
"""


@pytest.mark.parametrize(
    ("words", "status", "same", "alike", "right"),
    [
        ("--verify", 0, "yes: largest relative difference 0.5", "yes", True),
        ("--verify", 1, "NO: largest relative difference 1e-8", "yes", False),
        ("--verify --precision float32", 1, "NO: largest relative difference 2e-6", "yes", True),
        ("--verify --precision float32", 1, "NO: largest relative difference 2e-5", "yes", False),
        ("--verify --precision float32", 1, "NO: largest relative difference 2e-6", "NO", False),
        ("--verify --no-verify", 1, "", "NO", False),
    ],
)
def test_what_counts_as_right(words: str, status: int, same: str, alike: str, right: bool) -> None:
    said = f"{VERDICTS[0]}    {same}\n{VERDICTS[1]}       {alike}\n"
    assert is_right(words.split(), status, said) is right


def test_all_are_found_by_a_python_that_has_pytest_and_torch_alone(tmp_path: Path) -> None:
    program = tmp_path / "bare.py"
    program.write_text(BARE)
    env = clean_environment() | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "MINIDIST_TEST_PART": ""}
    outcome = run_job(
        [*warm_python(), str(program), str(HERE)],
        env=env,
        cwd=HERE.parents[1],
        timeout=60,
        capture=True,
    )
    assert outcome.returncode == 0, outcome.stdout
    assert all(
        f"{path.relative_to(HERE.parents[1])}: " in outcome.stdout
        for path in HERE.glob("test_*.py")
    )


def test_an_old_nccl_is_named_where_ranks_would_share_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "CPU", False)
    monkeypatch.setattr(jobs, "sharing_fault", lambda: "needs NCCL 2.30")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert jobs.refusal(1) == jobs.refusal(2) == ""
    assert jobs.refusal(4) == "4 ranks cannot share 2 GPUs: that needs NCCL 2.30"
    with pytest.raises(pytest.skip.Exception, match="that needs NCCL"):
        jobs.job(4, "program.py", timeout=1)


def test_every_file_is_in_one_part() -> None:
    assert sorted(name for part in PARTS.values() for name in part) == sorted(
        it.name for it in HERE.glob("test_*.py")
    )
