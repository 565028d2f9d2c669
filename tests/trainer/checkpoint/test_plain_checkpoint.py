"""The plain page of checkpoints: any ranks load what any have saved, each writes its own, and no
kill leaves half.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_store import TOUCHES, blank, dealt, model, simple, wanted
from test_store import save as save_fast

import minidist
from minidist.full.checkpoint import plain, restore
from minidist.full.checkpoint.pieces import Piece, take
from minidist.full.checkpoint.store import complete, newest
from minidist.full.comm import Communicator


def save(folder: Path, step: int, held: list[list[Piece]]) -> Path:
    """Save on as many ranks as hold something; nothing but barriers' empty messages is sent."""

    def program(comm: Communicator) -> Path:
        path = plain.save(folder, step, held[comm.rank], {"loss": 1.5}, comm)
        assert comm.traffic.bytes == 0
        return path

    return minidist.run(program, len(held))[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(2))
def test_any_ranks_load_what_any_others_have_saved_and_each_writes_its_own(
    seed: int, tmp_path: Path
) -> None:
    draw, tensors = random.Random(seed), model(seed)
    held = dealt(draw, tensors, draw.randint(4, 16))
    path, fast = save(tmp_path / "plain", 3, held), save_fast(tmp_path / "fast", 3, held)
    for rank, pieces in enumerate(held):
        file = path / f"rank-{rank:04d}.safetensors"
        own = {
            name: (tensor.dtype, extent.count) for name, extent, tensor in pieces if extent.count
        }
        assert file.exists() == bool(own)
        if own:
            assert {
                name: (tensor.dtype, tensor.numel()) for name, tensor in load_file(file).items()
            } == own
    pairs: list[tuple[Any, Path]] = [(plain.load, path), (plain.load, fast), (restore.read, path)]
    for read, there in pairs:
        asked = [piece for pieces in dealt(draw, tensors, draw.randint(4, 16)) for piece in pieces]
        blanks = [
            Piece(name, extent, blank(extent, tensor.dtype)) for name, extent, tensor in asked
        ]
        read(there, blanks)
        for name, extent, tensor in blanks:
            assert torch.equal(tensor, take(tensors[name], extent)), name
    assert restore.read_state(path) == {"step": 3, "loss": 1.5}


def value_of(path: Path) -> float:
    """Load a checkpoint of `simple` tensors; return which it is."""
    weight, norm = wanted()
    plain.load(path, [weight, norm])
    value = float(norm.tensor[0])
    assert torch.equal(norm.tensor, torch.full((5,), value))
    assert torch.equal(weight.tensor, torch.arange(60.0).view(10, 6) * value)
    return value


def killed(folder: Path, step: int, touch: int) -> int:
    """Save on three ranks in a child killed before its n-th touch of a file; return how many it
    took, or -9.
    """
    child = os.fork()
    if child == 0:
        left = touch

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in TOUCHES or (event == "open" and str(arguments[0]).startswith(str(folder))):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        status = 0
        sys.addaudithook(hook)
        try:
            save(folder, step, simple(float(step)))
            status = touch - left
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_kill_at_any_moment_leaves_the_old_one_or_the_new(tmp_path: Path) -> None:
    save(tmp_path, 1, simple(1.0))
    kills, last = 0, 1
    while (end := killed(tmp_path, last + 1, kills + 1)) < 0:
        kills += 1
        found = [int(value_of(path)) for path in complete(tmp_path)]
        assert found in (list(range(1, last + 1)), list(range(1, last + 2))), (
            f"killed before touch {kills}"
        )
        last = found[-1]
    assert kills >= end >= 11, (
        "a folder, a file of each rank, index and state, flushes of all six, a rename"
    )
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
    path = save(tmp_path, 1, simple())
    at = done.index("rename")
    assert sorted(done[:at]) == sorted(
        [*(file.name for file in path.iterdir()), ".unfinished-00000001"]
    )
    assert done[at - 1 :] == [".unfinished-00000001", "rename", tmp_path.name]


def test_a_complete_one_is_never_overwritten(tmp_path: Path) -> None:
    save(tmp_path, 1, simple(1.0))
    with pytest.raises(FileExistsError, match="step-00000001 is there already"):
        save(tmp_path, 1, simple(2.0))
    assert value_of(newest(tmp_path)) == 1.0
