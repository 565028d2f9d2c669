"""Checkpoints of many ranks: any layout writes, any other reads, and no moment of being killed
leaves half of one.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import cut, empty, flip
from safetensors.torch import load_file, save_file
from test_pieces import grid
from torch import Tensor

import minidist
from minidist.full.checkpoint import store
from minidist.full.checkpoint.index import parse
from minidist.full.checkpoint.pieces import Extent, Piece, take
from minidist.full.checkpoint.restore import names, read, read_state, verify
from minidist.full.checkpoint.saving import Writer
from minidist.full.checkpoint.store import (
    CheckpointError,
    abandon,
    begin,
    commit,
    complete,
    forget,
    newest,
    write_shard,
)
from minidist.full.comm import Communicator

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def model(seed: int = 0) -> dict[str, Tensor]:
    """Return whole tensors of every kind."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(4, 6), (7,), (), (3, 4, 5), (12, 2), (1, 9)]
    tensors = {
        f"layers.{number}.{str(dtype).removeprefix('torch.')}": (
            torch.randn(shape, generator=generator) * 50
        ).to(dtype)
        for number, (dtype, shape) in enumerate(itertools.product(DTYPES, shapes))
    }
    return tensors | {
        "layers.0.weight/exp_avg": torch.randn(5, 3, generator=generator),
        "step": torch.tensor(3.0),
    }


def dealt(draw: random.Random, tensors: dict[str, Tensor], ranks: int) -> list[list[Piece]]:
    """Cut each tensor at random, and give each piece to a random rank that has none of it yet."""
    held: list[list[Piece]] = [[] for _ in range(ranks)]
    for name, whole in tensors.items():
        extents = grid(draw, tuple(whole.shape))
        while len(extents) > ranks:
            extents = grid(draw, tuple(whole.shape))
        for rank, extent in zip(draw.sample(range(ranks), len(extents)), extents, strict=True):
            held[rank].append(Piece(name, extent, take(whole, extent)))
    return held


def save(
    folder: Path, step: int, held: list[list[Piece]], state: dict[str, Any] | None = None
) -> Path:
    """Do what the ranks do, one after the other."""
    unfinished = begin(folder, step)
    written = [write_shard(unfinished, rank, pieces) for rank, pieces in enumerate(held)]
    return commit(folder, step, pickle.loads(pickle.dumps(written)), state or {})


def blank(extent: Extent, dtype: torch.dtype, in_shape: bool = False) -> Tensor:
    values = torch.zeros(extent.count, dtype=dtype)
    return values.view(extent.block_shape) if in_shape else values


def simple(value: float = 1.0, size: int = 10) -> list[list[Piece]]:
    """Return what three ranks hold of two tensors; rank 2 has nothing."""
    weight, norm = torch.arange(size * 6.0).view(size, 6) * value, torch.full((5,), value)
    half, parts = Extent.of((size, 6), 1, 0, 3), Extent.of((size, 6), 1, 3, 6)
    return [
        [
            Piece("weight", half, weight[:, :3]),
            Piece("norm", Extent((5,), None, 0, 0, 0, 2), norm[:2]),
        ],
        [
            Piece("weight", parts, weight[:, 3:]),
            Piece("norm", Extent((5,), None, 0, 0, 2, 5), norm[2:]),
        ],
        [Piece("norm", Extent((5,), None, 0, 0, 5, 5), norm[5:])],
    ]


def wanted(size: int = 10) -> list[Piece]:
    return [
        Piece("weight", Extent.of((size, 6)), torch.zeros(size, 6)),
        Piece("norm", Extent.of((5,)), torch.zeros(5)),
    ]


def value_of(path: Path) -> float:
    """Verify a checkpoint of `simple` tensors, and return which it is."""
    verify(path)
    weight, norm = wanted()
    read(path, [weight, norm])
    value = float(norm.tensor[0])
    assert torch.equal(norm.tensor, torch.full((5,), value))
    assert torch.equal(weight.tensor, torch.arange(60.0).view(10, 6) * value)
    return value


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize("seed", range(12))
def test_any_layout_reads_what_any_other_wrote(seed: int, tmp_path: Path) -> None:
    draw, whole = random.Random(seed), model(seed)
    path = save(tmp_path, 7, dealt(draw, whole, draw.randint(1, 6)), {"note": [1, None, "ä"]})
    verify(path)
    assert read_state(path) == {"step": 7, "note": [1, None, "ä"]}
    assert names(path) == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in whole.items()
    }
    for pieces in dealt(draw, whole, draw.randint(1, 6)):
        asked = [piece._replace(tensor=torch.zeros_like(piece.tensor)) for piece in pieces]
        read(path, asked)
        for piece, got in zip(pieces, asked, strict=True):
            assert torch.equal(piece.tensor, got.tensor), piece.name
    everything = [
        Piece(name, Extent.of(tensor.shape), torch.zeros_like(tensor))
        for name, tensor in whole.items()
    ]
    read(path, everything)
    assert all(torch.equal(piece.tensor, whole[piece.name]) for piece in everything)


def test_tensors_are_filled_in_place_whatever_they_look_like(tmp_path: Path) -> None:
    path = save(tmp_path, 1, simple())
    wide = torch.zeros(10, 9)
    parameter = torch.nn.Parameter(torch.zeros(5))
    read(path, [Piece("weight", Extent.of((10, 6), 1, 2, 5), wide[:, ::3])])
    assert (
        torch.equal(wide[:, ::3], torch.arange(60.0).view(10, 6)[:, 2:5]) and not wide[:, 1].any()
    )
    read(path, [Piece("norm", Extent.of((5,)), parameter)])
    assert bool((parameter == 1).all()) and parameter.is_leaf


def test_slices_of_one_buffer_and_strided_blocks_are_written(tmp_path: Path) -> None:
    flat = torch.arange(10.0)
    pieces = [
        Piece("a", Extent.of((4,)), flat[:4]),
        Piece("b", Extent.of((2, 3)), flat[4:].view(3, 2).t()),
        Piece("c", Extent.of((2, 3)), torch.nn.Parameter(torch.ones(2, 3))),
    ]
    path = save(tmp_path, 1, [pieces])
    # anybody's reader will do; what is whole has its shape
    found = load_file(path / "rank-0000.safetensors")
    assert torch.equal(found["a"], flat[:4]) and torch.equal(found["b"], flat[4:].view(3, 2).t())


def test_the_files_are_what_they_are_said_to_be(tmp_path: Path) -> None:
    path = save(tmp_path, 3, simple())
    summed = ["index.json", "rank-0000.safetensors", "rank-0001.safetensors", "state.json"]
    assert sorted(file.name for file in path.iterdir()) == ["SHA256SUMS", *summed]
    assert [line.split()[1] for line in (path / "SHA256SUMS").read_text().splitlines()] == summed
    assert subprocess.run(["sha256sum", "--quiet", "-c", "SHA256SUMS"], cwd=path).returncode == 0
    entry = json.loads((path / "index.json").read_text())["tensors"]["weight"]
    assert entry["pieces"][1] == {
        "file": "rank-0001.safetensors",
        "block": [3, 6],
        "elements": [0, 30],
    }
    assert (entry["dtype"], entry["shape"], entry["dim"]) == ("float32", [10, 6], 1)
    assert not list(tmp_path.glob(".*"))


def test_the_same_layout_needs_its_own_file_only(tmp_path: Path) -> None:
    draw, whole = random.Random(3), model()
    held = dealt(draw, whole, 4)
    path = save(tmp_path, 1, held)
    for rank, pieces in enumerate(held):
        alone = tmp_path / f"alone-{rank}" / path.name
        alone.mkdir(parents=True)
        for name in (f"rank-{rank:04d}.safetensors", "index.json"):
            shutil.copy(path / name, alone)
        asked = [piece._replace(tensor=torch.zeros_like(piece.tensor)) for piece in pieces]
        read(alone, asked)
        assert all(
            torch.equal(piece.tensor, got.tensor) for piece, got in zip(pieces, asked, strict=True)
        )


def resident(which: str) -> int:
    """Return the memory of this process in MiB: VmRSS is now, VmHWM the most since it was last
    reset.
    """
    return next(
        int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith(which)
    )


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux says how much was mapped at most"
)
def test_no_more_comes_from_the_disk_than_is_asked_for(tmp_path: Path) -> None:
    size = 16 << 20  # elements: 64 MiB
    path = save(tmp_path, 1, [[Piece("a", Extent.of((size,)), torch.ones(size))]])

    def most(start: int, stop: int) -> int:
        asked = Piece("a", Extent((size,), None, 0, 0, start, stop), torch.zeros(stop - start))
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        read(path, [asked])
        assert bool((asked.tensor == 1).all())
        return resident("VmHWM") - before

    assert most(size // 2, size // 2 + 1000) < 8
    assert most(size // 2, size) > 30  # half of it: so the measurement sees something


# ---------------------------------------------------------------- which are kept


def test_the_newest_are_kept_and_every_so_many_steps_one(tmp_path: Path) -> None:
    (tmp_path / "step-notes").mkdir()
    for step in (1, 2, 10, 20, 25, 30, 100):
        save(tmp_path, step, simple())
    forget(tmp_path, keep=2, every=10)
    assert [path.name[-3:] for path in complete(tmp_path)] == ["010", "020", "030", "100"]
    forget(tmp_path, keep=3)
    assert [path.name[-3:] for path in complete(tmp_path)] == ["020", "030", "100"]
    forget(tmp_path, keep=0)
    assert newest(tmp_path).name == "step-00000100" and len(complete(tmp_path)) == 1
    assert not list(tmp_path.glob(".*"))


def test_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"--resume finds no checkpoint in .*: start without it"
    ):
        newest(tmp_path / "nowhere")


def test_a_complete_one_is_never_overwritten(tmp_path: Path) -> None:
    path = save(tmp_path, 3, simple(2.0))
    with pytest.raises(
        CheckpointError, match=r"step-00000003 is there already and is not overwritten: save to"
    ):
        begin(tmp_path, 3)
    unfinished = begin(tmp_path, 4)
    written = [write_shard(unfinished, rank, pieces) for rank, pieces in enumerate(simple(5.0))]
    shutil.copytree(path, tmp_path / "step-00000004")  # by another run, meanwhile
    with pytest.raises(
        CheckpointError, match=r"step-00000004 cannot be written \(.*\); step-00000003 is intact"
    ):
        commit(tmp_path, 4, written, {})
    assert value_of(path) == value_of(tmp_path / "step-00000004") == 2.0
    assert not list(tmp_path.glob(".*"))


def test_what_a_killed_run_left_is_cleared_and_never_read(tmp_path: Path) -> None:
    save(tmp_path, 1, simple())
    for name in (".unfinished-00000002", ".unfinished-00000009", ".unfinished"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0000.safetensors").write_text("half of i")
    (tmp_path / ".unfinished-index.json").write_text("half of i")
    assert newest(tmp_path).name == "step-00000001"
    unfinished = begin(tmp_path, 2)
    assert list(unfinished.iterdir()) == [] and list(tmp_path.glob(".*")) == [unfinished]
    abandon(unfinished)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


# ---------------------------------------------------------------- our own mistakes


def test_an_element_written_never_or_twice_is_our_mistake(tmp_path: Path) -> None:
    zero, one, two = simple()
    save(tmp_path, 1, [zero, one, two], {})
    cases: list[tuple[list[list[Piece]], str]] = [
        ([zero, two], "each element of weight once: along dim 1, 3 to 6 are missing"),
        ([zero, one, zero], "each element of weight once: of .* elements 0 to 30 are there twice"),
        ([zero, [one[0]], two], "each element of norm once: of .* elements 2 to 5 are missing"),
        (
            [zero, [one[0], one[1]._replace(tensor=one[1].tensor.double())]],
            "written norm with different dtypes",
        ),
    ]
    for held, words in cases:
        with pytest.raises(AssertionError, match=words):
            save(tmp_path, 2, held)
        assert not list(tmp_path.glob(".*")) and len(complete(tmp_path)) == 1
    with pytest.raises(AssertionError, match="rank 0 writes a name twice"):
        save(tmp_path, 2, [[*zero, zero[0]], one])
    with pytest.raises(AssertionError, match=r"norm: \[2\] is not what Extent"):
        save(tmp_path, 2, [[one[1]._replace(tensor=zero[1].tensor)], one])
    with pytest.raises(TypeError):
        save(tmp_path, 2, simple(), {"path": object()})
    assert not list(tmp_path.glob(".*")) and value_of(newest(tmp_path)) == 1.0


# ---------------------------------------------------------------- damage


@pytest.fixture
def two(tmp_path: Path) -> Path:
    save(tmp_path, 4, simple(4.0))
    return save(tmp_path, 5, simple(5.0))


@pytest.mark.parametrize(
    "name", ["rank-0000.safetensors", "index.json", "state.json", "SHA256SUMS"]
)
@pytest.mark.parametrize("harm", [cut, flip, empty, Path.unlink])
def test_damage_is_found_by_the_checksums(
    name: str, harm: Callable[[Path], None], two: Path
) -> None:
    harm(two / name)
    if name == "SHA256SUMS" and harm is cut:  # the last line has lost its end: nothing that matters
        verify(two)
        return
    with pytest.raises(CheckpointError) as caught:
        verify(two)
    message = str(caught.value)
    assert str(two) in message and name in message and "\n" not in message
    assert message.endswith("remove step-00000005 to resume from step-00000004")
    assert value_of(newest(two.parent).with_name("step-00000004")) == 4.0


def test_ranks_share_the_verifying(two: Path) -> None:
    flip(two / "rank-0001.safetensors")
    damaged = []
    for rank in range(3):
        try:
            verify(two, slice(rank, None, 3))
        except CheckpointError as error:
            damaged.append(str(error))
    assert len(damaged) == 1
    assert (
        "rank-0001.safetensors is truncated or damaged: its checksum is not the one in SHA256SUMS: "
    ) in damaged[0]
    verify(two, slice(0))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (cut, r"rank-0001.safetensors cannot be read \(.*incomplete metadata"),
        (empty, r"rank-0001.safetensors cannot be read \(.*\): remove step"),
        (
            Path.unlink,
            r"rank-0001.safetensors cannot be read \(No such file or directory.*\): remove step",
        ),
        (
            lambda file: save_file({"weight": torch.zeros(30)}, file),
            r"rank-0001.safetensors lacks float32 \[3\] of norm, which index.json says it has: remove",
        ),
        (
            lambda file: save_file({"weight": torch.zeros(29), "norm": torch.zeros(3)}, file),
            r"rank-0001.safetensors lacks float32 \[30\] of weight, which index.json says it has: remove",
        ),
        (
            lambda file: save_file(
                {"weight": torch.zeros(30), "norm": torch.zeros(3).half()}, file
            ),
            r"rank-0001.safetensors lacks float32 \[3\] of norm, which index.json says it has: remove",
        ),
    ],
)
def test_a_damaged_shard_is_named_and_nothing_is_changed(
    harm: Callable[[Path], None], words: str, two: Path, tmp_path: Path
) -> None:
    harm(two / "rank-0001.safetensors")
    asked = wanted()
    with pytest.raises(CheckpointError, match=words) as caught:
        read(two, asked)
    assert str(caught.value).endswith("to resume from step-00000004") and str(two) in str(
        caught.value
    )
    assert not any(piece.tensor.any() for piece in asked)
    shutil.rmtree(tmp_path / "step-00000004")
    with pytest.raises(
        CheckpointError, match=r"there is no earlier one: start afresh, with another --save$"
    ):
        read(two, asked)


def change(path: Path, edit: Callable[[Any], object]) -> None:
    tree = json.loads((path / "index.json").read_text())
    edit(tree["tensors"])
    (path / "index.json").write_text(json.dumps(tree))


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (
            lambda t: t["norm"]["pieces"].pop(),
            r"each element of norm is: of \[5\], elements 2 to 5 are missing: remove",
        ),
        (
            lambda t: t["weight"]["pieces"].pop(0),
            "each element of weight is: along dim 1, 0 to 3 are missing: remove",
        ),
        (
            lambda t: t["norm"]["pieces"].append(
                {"file": "rank-0002.safetensors", "block": [0, 0], "elements": [1, 3]}
            ),
            r"each element of norm is: of \[5\], elements 1 to 2 are there twice",
        ),
        (
            lambda t: t["norm"]["pieces"][1].update(file="rank-0007.safetensors"),
            r"rank-0007.safetensors cannot be read \(No such file",
        ),
        (
            lambda t: t["norm"].update(shape=[6]),
            r"norm is float32 \[6\] there and float32 \[5\] here: use the options",
        ),
        (
            lambda t: t["norm"].update(dtype="float64"),
            r"another model: norm is float64 \[5\] there and float32 \[5\]",
        ),
        (
            lambda t: t.pop("norm"),
            r"belongs to another model: norm is missing there and float32 \[5\] here: use the",
        ),
    ],
)
def test_an_index_that_does_not_fit_is_named(
    edit: Callable[[Any], object], words: str, two: Path
) -> None:
    change(two, edit)
    asked = wanted()
    with pytest.raises(CheckpointError, match=words):
        read(two, asked)
    assert not any(piece.tensor.any() for piece in asked)


@pytest.mark.parametrize(
    "edit",
    [
        lambda t: t.update(norm=3),
        lambda t: t["norm"].pop("dtype"),
        lambda t: t["norm"].update(dtype="float33"),
        lambda t: t["norm"].update(dtype="nn"),
        lambda t: t["norm"].update(shape=["5"]),
        lambda t: t["norm"].update(shape=[4]),
        lambda t: t["norm"].update(shape=[5.0]),
        lambda t: t["norm"].update(dim=1),
        lambda t: t["norm"].update(pieces=[]),
        lambda t: t["norm"].update(pieces=7),
        lambda t: t["norm"]["pieces"][0].pop("block"),
        lambda t: t["norm"]["pieces"][0].update(elements=[0]),
        lambda t: t["norm"]["pieces"][0].update(elements=["0", "2"]),
        lambda t: t["norm"]["pieces"][0].update(elements=[0, 6]),
        lambda t: t["norm"]["pieces"][0].update(file="../../secret"),
        lambda t: t["norm"]["pieces"][0].update(file="state.json"),
        lambda t: t["norm"]["pieces"][0].update(file="rank-/../../secret"),
        lambda t: t["norm"]["pieces"][0].update(file=None),
    ],
)
def test_what_is_no_index_is_refused(edit: Callable[[Any], object], two: Path) -> None:
    change(two, edit)
    for act in (names, verify, lambda path: read(path, wanted())):
        with pytest.raises(
            CheckpointError,
            match=r"index.json is damaged: it is not what was written: remove step-0",
        ):
            act(two)


NO_TREE = ["", "{", "[]", "3", "\xff", "null"]
NO_INDEX = [*NO_TREE, "{}", '{"tensors": 3}', '{"tensors": [{}]}']


@pytest.mark.parametrize(
    ("name", "act", "text"),
    [("index.json", names, text) for text in NO_INDEX]
    + [("state.json", read_state, text) for text in NO_TREE],
)
def test_what_is_no_json_of_ours_is_refused(
    name: str, act: Callable[[Path], object], text: str, two: Path, tmp_path: Path
) -> None:
    (two / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(
        CheckpointError,
        match=rf"{name} is damaged: it is not what was written: remove step-00000005",
    ):
        act(two)


def test_another_models_tensors_are_refused(two: Path) -> None:
    # nothing is asked for
    read(two, [Piece("gone", Extent((3,), None, 0, 0, 1, 1), torch.zeros(0))])
    words = r"step-00000005 belongs to another model: norm is float32 \[5\] there and float32 \[5, 1\] here: use the"
    with pytest.raises(CheckpointError, match=words):
        read(two, [Piece("norm", Extent.of((5, 1)), torch.zeros(5))])
    half = Piece("norm", Extent.of((5,)), torch.zeros(5).half())
    with pytest.raises(
        CheckpointError, match=r"norm is float32 \[5\] there and float16 \[5\] here"
    ):
        read(two, [half])


def test_a_checkpoint_without_an_index_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    for path in (tmp_path / "step-00000001", tmp_path / "elsewhere"):
        for act in (verify, names, read_state, lambda path: read(path, wanted())):
            with pytest.raises(
                CheckpointError, match=r"cannot be read \(No such file or directory\): "
            ):
                act(path)


# ---------------------------------------------------------------- the disk refuses


@pytest.fixture
def small_files() -> Iterator[Callable[[], None]]:
    """Make every file that grows beyond 50 kB fail, as on a full disk, from the call on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_sentence_and_loses_nothing(
    tmp_path: Path, small_files: Callable[[], None]
) -> None:
    save(tmp_path, 4, simple(4.0))
    small_files()
    unfinished = begin(tmp_path, 5)
    write_shard(unfinished, 0, simple()[0])
    words = (
        r"the checkpoint .*step-00000005 cannot be written \("
        r".*File too large.*\); step-00000004 is intact: --resume"
    )
    with pytest.raises(CheckpointError, match=words):
        write_shard(unfinished, 1, simple(size=10_000)[1])
    abandon(unfinished)
    with pytest.raises(CheckpointError, match=words):  # rank 0's own files may be too much, too
        unfinished = begin(tmp_path, 5)
        written = [write_shard(unfinished, rank, pieces) for rank, pieces in enumerate(simple())]
        commit(tmp_path, 5, written, {"long": "x" * 60_000})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]
    assert value_of(newest(tmp_path)) == 4.0


def test_a_shard_that_the_disk_may_not_hold_is_not_taken_for_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: int) -> None:
        raise OSError(5, "Input/output error")

    unfinished = begin(tmp_path, 1)
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(
        CheckpointError, match=r"step-00000001 cannot be written \(Input/output error\); none was"
    ):
        write_shard(unfinished, 0, simple()[0])


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError, match=r"cannot be written \(Not a directory\); none was written before"
    ):
        begin(tmp_path / "file" / "run", 1)
    with pytest.raises(
        CheckpointError,
        match=r"cannot be written \(.*No such file or directory.*\); none was written",
    ):
        write_shard(tmp_path / ".unfinished-00000001", 0, simple()[0])


def test_ranks_that_do_not_share_the_folder_are_told(two: Path) -> None:
    unfinished = begin(two.parent, 6)
    written = [write_shard(unfinished, rank, pieces) for rank, pieces in enumerate(simple())]
    (unfinished / "rank-0001.safetensors").unlink()
    words = r"rank 0 does not find rank-0001.safetensors: all ranks must share the folder\); step-0.*5 is"
    with pytest.raises(CheckpointError, match=words):
        commit(two.parent, 6, written, {})
    assert len(complete(two.parent)) == 2 and not list(two.parent.glob(".*"))


# ---------------------------------------------------------------- any moment may be the last


def test_a_failure_at_any_touch_of_the_disk_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each flush, rename and opening of a file in turn is refused; what is complete then can be
    read.
    """
    touches, refused = 0, 0

    def refusing(act: Callable[..., Any]) -> Callable[..., Any]:
        def once(*arguments: Any, **options: Any) -> Any:
            nonlocal touches
            touches += 1
            if touches == refused:
                raise OSError(5, "Input/output error")
            return act(*arguments, **options)

        return once

    for name in ("fsync", "rename", "open", "mkdir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    for name in ("write_text", "stat"):
        monkeypatch.setattr(Path, name, refusing(getattr(Path, name)))
    failures = 0
    for refused in range(1, 200):
        folder, touches = tmp_path / str(refused), -10_000
        save(folder, 1, simple(1.0))
        touches = 0
        try:
            save(folder, 2, simple(2.0))
            forget(folder, keep=1)
        except CheckpointError as error:
            failures += 1
            assert "Input/output error" in str(error)
        ended, touches = touches, -10_000
        found = complete(folder)
        assert [value_of(path) for path in found] in ([1.0], [1.0, 2.0], [2.0])
        assert value_of(save(folder, 3, simple(3.0))) == 3.0 and not list(folder.glob(".*"))
        if ended < refused:
            break
    assert 20 < failures < 190


@pytest.mark.skipif(
    not Path("/proc/self/fd").exists(), reason="only Linux says which file a descriptor is of"
)
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
    assert set(done[:at]) == {file.name for file in path.iterdir()} | {".unfinished-00000001"}
    assert done[at - 1 :] == [".unfinished-00000001", "rename", tmp_path.name]
    save(tmp_path, 2, simple())
    done.clear()
    forget(tmp_path, keep=1)
    assert done == ["rename", tmp_path.name]


def saves(folder: Path, first: int) -> None:
    """Save for ever, the way a run does."""
    for step in itertools.count(first):
        save(folder, step, simple(float(step)))
        forget(folder, keep=2, every=10)


TOUCHES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir")


def killed(folder: Path, first: int, touch: int) -> int:
    """Save in a child, which is killed before its n-th touch of a file; return how it ended."""
    child = os.fork()
    if child == 0:
        left = touch

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in TOUCHES or (event == "open" and str(arguments[0]).startswith(str(folder))):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            saves(folder, first)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def test_being_killed_at_any_touch_of_a_file_leaves_whole_checkpoints(tmp_path: Path) -> None:
    """In turn before each of the touches of four saves, the later of which also forget."""
    save(tmp_path, 1, simple(1.0))
    step = 1
    for touch in range(1, 90):
        assert os.WTERMSIG(killed(tmp_path, step + 1, touch)) == signal.SIGKILL
        found = complete(tmp_path)
        assert newest(tmp_path) == found[-1] and store.step_of(found[-1]) >= step
        for path in found:
            assert value_of(path) == store.step_of(path) == read_state(path)["step"]
        step = store.step_of(found[-1])
    forget(tmp_path, keep=1)
    save(tmp_path, step + 1, simple())
    assert not list(tmp_path.glob(".*"))


def test_nothing_that_was_read_hangs_on_to_the_file(two: Path) -> None:
    asked = wanted()
    read(two, asked)
    flip(two / "rank-0001.safetensors")
    shutil.rmtree(two)
    assert torch.equal(asked[0].tensor, torch.arange(60.0).view(10, 6) * 5)


def test_the_index_says_the_same_when_read(two: Path) -> None:
    stored = parse((two / "index.json").read_text())["weight"]
    assert stored.pieces == [
        (Extent.of((10, 6), 1, 0, 3), "rank-0000.safetensors"),
        (Extent.of((10, 6), 1, 3, 6), "rank-0001.safetensors"),
    ]


# ---------------------------------------------------------------- beside training


def test_a_writer_copies_into_the_memory_of_its_last_copy(tmp_path: Path) -> None:
    """Three checkpoints, whose tensors change; the third has one of another shape."""

    def program(comm: Communicator) -> None:
        writer = Writer(tmp_path, comm, keep=9, every=0)
        values = {"a": torch.zeros(5), "b": torch.zeros(2, 3, dtype=torch.float64)}
        places: list[dict[str, int]] = []
        for step in range(1, 4):
            if step == 3:
                values["b"] = torch.zeros(7, dtype=torch.float64)
            for value in values.values():
                value.fill_(step)
            pieces = [Piece(name, Extent.of(value.shape), value) for name, value in values.items()]
            writer.save(step, pieces if comm.rank == 0 else [], {})
            for value in values.values():
                value.zero_()  # training goes on meanwhile
            writer.wait()
            places.append({name: copy.data_ptr() for name, copy in writer.copies.items()})
        first, second, third = places
        assert first == second
        assert comm.rank or (first["a"] == third["a"] and len(third) == 2)

    minidist.run(program, 2)
    for step in range(1, 4):
        (file,) = store.final_of(tmp_path, step).glob("*.safetensors")
        saved = load_file(file)
        assert saved["b"].shape == ((2, 3) if step < 3 else (7,))
        assert all((value == step).all() for value in saved.values())


def test_a_writer_tells_how_long_training_waited_and_how_long_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = store.write_shard

    def slowly(*given: Any) -> Any:
        time.sleep(1)
        return write(*given)

    def program(comm: Communicator) -> list[tuple[float, float]]:
        writer = Writer(tmp_path, comm, keep=9, every=0)
        writer.save(1, [Piece("a", Extent.of((5,)), torch.zeros(5))], {})
        writer.save(2, [Piece("a", Extent.of((5,)), torch.zeros(5))], {})  # waits for the first
        writer.wait()
        return writer.saves

    monkeypatch.setattr(store, "write_shard", slowly)
    ((first, second),) = minidist.run(program, 1)
    assert first[0] < 0.8 < first[1]
    assert second[0] > 0.1 and second[1] > 0.8
