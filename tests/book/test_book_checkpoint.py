"""A checkpoint of the book: a kill before any touch of the disk leaves the old one or the new one."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minidist.checkpoint import Piece, load, newest, save
from minidist.comm import Communicator
from minidist.tensor import Block
from minidist.threads import run

SHAPE = (4, 6)
TOUCHES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def piece(block: Block, start: int, tensor: Tensor) -> Piece:
    return Piece("weight", block, start, tensor)


def held(rank: int, value: float) -> list[Piece]:
    """Return what one of four ranks has: two columns blocks, each dealt out to two ranks."""
    whole = torch.arange(24.0).view(SHAPE) * value
    first, start = 3 * (rank % 2), 7 * (rank // 2)
    stop = 7 if start == 0 else 12
    block = Block(SHAPE, 1, first, first + 3)
    return [piece(block, start, whole[:, first : first + 3].flatten()[start:stop])]


def save_all(folder: Path, step: int) -> Path:
    def program(comm: Communicator) -> Path:
        return save(folder, step, held(comm.rank, float(step)), {"loss": 1.5}, comm)

    return run(program, 4)[0]


def value_of(path: Path) -> float:
    """Load the whole, and a row of it; return by what the numbers were multiplied."""
    whole, row = torch.zeros(24), torch.zeros(6)
    all_of_it, third = Block(SHAPE, 0, 0, 4), Block(SHAPE, 0, 2, 3)
    state = load(path, [piece(all_of_it, 0, whole), piece(third, 0, row)])
    value = float(whole[1])
    assert torch.equal(whole, torch.arange(24.0) * value) and torch.equal(row, whole[12:18])
    assert state == {"step": int(value), "loss": 1.5}
    return value


def killed(folder: Path, step: int, touch: int) -> int:
    """Save in a child that is killed before its n-th touch; return how many it took, or -9."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left, status = touch, 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in TOUCHES or (event == "open" and str(arguments[0]).startswith(str(folder))):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    try:
        save_all(folder, step)
        status = touch - left
    finally:
        os._exit(status)


def test_a_kill_before_any_touch_leaves_the_old_one_or_the_new(tmp_path: Path) -> None:
    save_all(tmp_path, 1)
    kills, last = 0, 1
    while (end := killed(tmp_path, last + 1, kills + 1)) < 0:
        kills += 1
        found = sorted(int(value_of(path)) for path in tmp_path.glob("step-*"))
        assert found in (list(range(1, last + 1)), list(range(1, last + 2))), kills
        last = found[-1]
    assert kills >= end >= 10, "a folder, four files, the state, their flushes, a rename"
    assert value_of(newest(tmp_path)) == last + 1
    assert not list(tmp_path.glob(".*")), "what killed runs left is gone"


def test_the_disk_holds_everything_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def flushed(descriptor: int) -> None:
        fsync(descriptor)
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def renamed(*names: Any, **rest: Any) -> None:
        rename(*names, **rest)
        done.append("rename")

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    path = save_all(tmp_path, 1)
    at = done.index("rename")
    assert sorted(done[:at]) == sorted([*(f.name for f in path.iterdir()), ".unfinished-00000001"])
    assert done[at - 1 :] == [".unfinished-00000001", "rename", tmp_path.name]


def test_a_complete_one_is_never_overwritten(tmp_path: Path) -> None:
    path = save_all(tmp_path, 1)
    with pytest.raises(FileExistsError, match="step-00000001 is there already"):
        save_all(tmp_path, 1)
    assert value_of(path) == 1
