"""A run on the GPU saves; the CPU continues it, on another layout; the GPU continues that."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
import torch
from jobs import CPU, ENGINE, RANKS, succeeds
from training import TINY, tensors

LAYOUTS = {
    1: "--zero 3",
    2: "--dp 2 --zero 3 --offload memory",
    4: "--pp 2 --tp 2 --sp --schedule zb-h1",
}
RUN = "--layers 2 --precision float64 --lr 0.01 --steps 6 --save-every 2 --keep 9 --sample 0"
OFTEN = [f"step-{step:08}" for step in (2, 4, 6)]


def trained(ranks: int, folder: Path, words: str, on_cpu: bool) -> None:
    """Train to step 6, from where the folder's checkpoints end, with the words of this layout."""
    resume = ["--resume"] * folder.exists()
    program = [
        "-m",
        "minidist",
        "train",
        *TINY,
        *shlex.split(f"{RUN} {words}"),
        "--save",
        str(folder),
        *resume,
    ]
    said = succeeds(ranks, *program, timeout=120, on_cpu=on_cpu)
    assert sorted(path.name for path in folder.glob("step-*")) == OFTEN
    assert ("resumed after step" in said) == bool(resume)


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", RANKS)
def test_checkpoints_move_from_the_gpu_to_the_cpu_and_back(ranks: int, tmp_path: Path) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    trained(ranks, whole, LAYOUTS[ranks], CPU)
    shutil.copytree(whole, moved)
    for name in OFTEN[1:]:
        shutil.rmtree(moved / name)
    trained(2, moved, "--tp 2", True)  # continues after step 2
    shutil.rmtree(moved / OFTEN[2])
    trained(ranks, moved, LAYOUTS[ranks], CPU)  # and after step 4
    expected, found = tensors(whole / OFTEN[2]), tensors(moved / OFTEN[2])
    assert found.keys() == expected.keys() and ENGINE
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-9, atol=1e-9 * float(tensor.abs().max()), msg=name
        )
