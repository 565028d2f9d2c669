"""`lessons/cluster.sbatch`, with stand-ins for SLURM: what it would run, and two tasks that really
run.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import clean_environment, free_port

from minidist.full.launch.jobs import Outcome, run_job

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "lessons" / "cluster.sbatch"
LESSON = "lessons/02_ring_all_reduce/cluster.py"

# It notes its arguments and what it was told, and starts two tasks if it is told to.
SRUN = """#!{python}
import itertools, json, os, subprocess, sys
names = "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "SRUN_CPUS_PER_TASK"
told = {{name: os.environ.get(name) for name in names}}
open(os.environ["NOTES"], "w").write(json.dumps({{"argv": sys.argv[1:], "cwd": os.getcwd(), **told}}))
command = list(itertools.dropwhile(lambda word: word.startswith("--"), sys.argv[1:]))
tasks = int(os.environ.get("TASKS", 0))
own = [{{"SLURM_PROCID": str(k), "SLURM_LOCALID": str(k), "SLURM_NTASKS": str(tasks)}} for k in range(tasks)]
running = [subprocess.Popen(command, env=os.environ | more | {{"SLURM_STEP_TASKS_PER_NODE": "2"}}) for more in own]
sys.exit(max([task.wait() for task in running], default=0))
"""
SCONTROL = (
    '#!/bin/sh\n[ "$1 $2 $3" = "show hostnames node[07-08]" ] && printf "node07\\nnode08\\n"\n'
)

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="the script is for bash")


def sbatch(folder: Path, *arguments: str, **more: str) -> Outcome:
    """Run the script as `sbatch` would, submitted from the repository."""
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    spooled = folder / "slurm_script"  # SLURM runs a copy
    shutil.copy(SCRIPT, spooled)
    job = {
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "node[07-08]",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    told = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "NOTES": str(folder / "notes")}
    env = {name: value for name, value in clean_environment().items() if name != "OMP_NUM_THREADS"}
    env |= job | told | {"SLURM_CPUS_PER_TASK": "3", "MINIDIST_PYTHON": sys.executable} | more
    return run_job(
        ["bash", str(spooled), *arguments], env=env, cwd=folder, timeout=100, capture=True
    )


def test_it_is_a_script_that_bash_can_read() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0
    text = SCRIPT.read_text()
    directives = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    first_command = text.index("\nset -euo")
    assert all(text.index(line) < first_command for line in directives), (
        "SLURM reads them only before any command"
    )
    assert {"--nodes", "--ntasks-per-node", "--gpus-per-node"} <= {
        line.split()[1].split("=")[0] for line in directives
    }
    assert text.count("EDIT") >= 8


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        (["02"], [LESSON]),
        (["02", "--minidist"], [LESSON, "--minidist"]),
        (
            ["train", "--dp", "16", "--text", "a b.txt"],
            ["-m", "minidist", "train", "--dp", "16", "--text", "a b.txt"],
        ),
    ],
    ids=["lesson", "its twin", "trainer"],
)
def test_what_it_starts(tmp_path: Path, arguments: list[str], program: list[str]) -> None:
    outcome = sbatch(tmp_path, *arguments)
    assert outcome.returncode == 0, outcome.stderr
    notes = json.loads((tmp_path / "notes").read_text())
    assert notes["argv"] == ["--kill-on-bad-exit=1", "--label", sys.executable, "-u", *program]
    assert notes["cwd"] == str(ROOT)
    assert (notes["MASTER_ADDR"], notes["MASTER_PORT"]) == ("node07", "24567")
    assert (notes["OMP_NUM_THREADS"], notes["SRUN_CPUS_PER_TASK"]) == ("3", "3")
    assert "meeting at node07:24567" in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "more", "said"),
    [
        ([], {}, "say what to run"),
        (["99"], {}, "there is no lesson '99' with a cluster.py: there are 01_"),
        (["0"], {}, "there is no lesson '0'"),
        (["02"], {"SLURM_JOB_ID": ""}, "this is no SLURM job"),
        (["02"], {"SLURM_SUBMIT_DIR": "/"}, "there is no folder lessons in /"),
        (["02"], {"MINIDIST_PYTHON": "no-such-python"}, "there is no no-such-python on the node"),
        (["02"], {"SLURM_JOB_NODELIST": "nowhere"}, "scontrol names no host of 'nowhere'"),
    ],
    ids=["nothing", "no lesson", "half a number", "no job", "elsewhere", "no python", "no host"],
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path, arguments: list[str], more: dict[str, str], said: str
) -> None:
    outcome = sbatch(tmp_path, *arguments, **more)
    assert outcome.returncode == 2 and not (tmp_path / "notes").exists()
    assert said in outcome.stderr and outcome.stderr.count("\n") == 1


def test_the_exit_status_is_that_of_the_tasks(tmp_path: Path) -> None:
    outcome = sbatch(tmp_path, "train", "--no-such-option", TASKS="1", MASTER_ADDR="127.0.0.1")
    assert outcome.returncode == 2


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(["02"], marks=pytest.mark.soak), ["02", "--minidist"]],
    ids=["production", "minidist"],
)
def test_two_tasks_train(tmp_path: Path, arguments: list[str]) -> None:
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CUDA_VISIBLE_DEVICES": ""}
    outcome = sbatch(tmp_path, *arguments, TASKS="2", GLOO_SOCKET_IFNAME="lo", **here)
    assert outcome.returncode == 0, outcome.stderr
    lines = [line for line in outcome.stdout.splitlines() if "loss" in line]
    assert len(lines) == 5 and all("on 2 ranks, cpu" in line for line in lines)
