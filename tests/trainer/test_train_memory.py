"""`train` in 16 bits, recomputing, with its state elsewhere: the numbers of the serial run, and the
bits of before.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from ranks import mpirun
from torch import Tensor
from training import PROGRAM, TINY, count_calls, losses, metrics, train_on

from minidist.cli import train as command
from minidist.cli.train import main
from minidist.full.comm import Communicator, run
from minidist.full.memory.offload import OffloadedOptimizer
from minidist.full.model import GPT, gpt
from minidist.full.precision.mixed import LossScaler
from minidist.full.trainer import checked, optimizer, start
from minidist.full.trainer.loop import Trainer
from minidist.further import parse

pytestmark = pytest.mark.filterwarnings(
    "error::RuntimeWarning"
)  # numpy must not complain of what the scaler deals with
RUN = "--layers 3 --dropout 0.1 --tied --lr 0.01 --steps 6 --save-every 3 --keep 9"


def tensors(folder: Path, step: int = 6) -> dict[str, Tensor]:
    """Return all that a checkpoint holds, but not what has no dimensions."""
    held = training.tensors(folder / f"step-{step:08d}")
    return {name: tensor for name, tensor in held.items() if tensor.dim()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("ranks", "words", "later"),
    [
        pytest.param(
            1, "--precision bfloat16 --recompute full --offload disk", 3, marks=pytest.mark.soak
        ),
        (2, "--precision bfloat16 --zero 1 --accumulate 2 --recompute sqrt --offload memory", 3),
        pytest.param(
            *(3, "--precision bfloat16 --zero 2 --offload disk", 1), marks=pytest.mark.soak
        ),
        pytest.param(
            *(3, "--precision bfloat16 --zero 3 --offload disk --recompute full", 2),
            marks=pytest.mark.soak,
        ),
        (4, "--precision float16 --zero 3 --hsdp 2 --accumulate 2 --offload memory", 2),
        pytest.param(
            *(4, "--precision bfloat16 --strategy naive --recompute 'every 2'", 2),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            *(2, "--precision float16 --recompute selective --offload disk --accumulate 3", 4),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            3, "--precision float16 --zero 1 --bucket-mib 0.001", 1, marks=pytest.mark.soak
        ),
        pytest.param(
            *(
                4,
                "--precision float16 --zero 2 --accumulate 2 --recompute full --offload memory",
                2,
            ),
            marks=pytest.mark.soak,
        ),
        pytest.param(2, "--precision float16 --strategy server", 1, marks=pytest.mark.soak),
        (3, "--precision float32 --zero 2 --recompute 'every 3' --offload disk --accumulate 2", 2),
        pytest.param(
            *(4, "--precision float64 --zero 1 --recompute selective --offload memory", 3),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            *(3, "--precision float64 --offload disk --recompute sqrt --accumulate 2", 2),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_combined_they_are_verified_and_resumed(
    ranks: int, words: str, later: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the same ranks to the same bits; on another number, and without any of it, to the serial
    numbers.
    """
    folder = tmp_path / "run"
    assert train_on(ranks, RUN, words, f"--save {folder} --verify") == 0, capsys.readouterr().out
    finished = tensors(folder)
    for resumed, options in ((ranks, words), (later, words), (1, " ".join(words.split()[:2]))):
        shutil.rmtree(folder / "step-00000006")
        # those bits have been verified
        verify = "--verify" if (resumed, options) != (ranks, words) else ""
        assert train_on(resumed, RUN, options, f"--save {folder} {verify} --resume") == 0, (
            capsys.readouterr().out
        )
        assert verify or same_bits(tensors(folder), finished)
        assert tensors(folder).keys() == finished.keys()
    assert {path.name for path in folder.iterdir()} == {
        ".lock",
        "metrics.jsonl",
        "step-00000003",
        "step-00000006",
    }


@pytest.mark.parametrize(
    "zero", (*(pytest.param(zero, marks=pytest.mark.soak) for zero in (0, 2)), 1, 3)
)
@pytest.mark.parametrize("precision", (pytest.param("float64", marks=pytest.mark.soak), "bfloat16"))
def test_recomputing_and_offloading_change_no_bit(
    zero: int, precision: str, tmp_path: Path
) -> None:
    ways = (
        "",
        "--recompute full",
        "--recompute selective --offload memory",
        "--recompute 'every 2' --offload disk",
    )
    for number, words in enumerate(ways):
        options = f"--precision {precision} --zero {zero} --steps 3 --save {tmp_path / str(number)}"
        assert train_on(2, RUN, words, options) == 0
    first = tensors(tmp_path / "0", 3)
    assert any(name.endswith("/master") for name in first) == (precision == "bfloat16")
    assert all(
        same_bits(first, tensors(tmp_path / str(number), 3)) for number in range(1, len(ways))
    )


@pytest.mark.parametrize(
    ("policy", "blocks", "attentions"),
    [("none", 3, 3), ("full", 6, 6), ("selective", 3, 6), ("sqrt", 6, 6), ("every 3", 6, 6)],
)
def test_backward_computes_again_what_the_policy_says(
    policy: str, blocks: int, attentions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    count_calls(calls, gpt.Layer, "forward", monkeypatch)
    count_calls(calls, gpt, "causal_attention", monkeypatch)
    assert train_on(1, f"--layers 3 --steps 1 --recompute '{policy}'") == 0
    assert calls == {"forward": blocks, "causal_attention": attentions}


@pytest.mark.parametrize("zero", (0, 1, 2, 3))
@pytest.mark.parametrize("precision", ("float32", "bfloat16"))
def test_state_lives_where_it_is_told_to_and_only_a_ranks_part(
    zero: int, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers: list[Trainer] = []

    def noted(*args: Any) -> Trainer:
        trainers.append(Trainer(*args))
        return trainers[-1]

    monkeypatch.setattr(command, "Trainer", noted)
    words = f"--steps 2 --precision {precision} --zero {zero} --offload"
    assert train_on(2, words, f"disk --offload-folder {tmp_path}") == 0
    on_disk, trainers = trainers, []
    assert train_on(2, words, "memory") == 0
    total = on_disk[0].model.config.parameter_count * (12 if precision == "bfloat16" else 8)
    for trainer in (*on_disk, *trainers):
        assert isinstance(trainer.optimizer, OffloadedOptimizer)
        tensors = [
            t for state in trainer.optimizer.state.values() for t in state.values() if t.dim()
        ]
        assert sum(tensor.nbytes for tensor in tensors) == pytest.approx(
            total / 2 if zero else total, rel=0.01
        )
        files = {id(file) for named in trainer.optimizer.files.values() for file in named.values()}
        assert all(id(tensor) in files or not tensor.numel() for tensor in tensors) == (
            trainer in on_disk
        )


@pytest.mark.parametrize("words", ("float32", "bfloat16", "bfloat16 --zeropp"))
def test_shards_of_zero_3_are_files_too(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are no part of the optimizer's state, and would stay in memory unseen."""
    files: list[Tensor] = []
    trainers: list[Trainer] = []
    plain = optimizer.mapped

    def noted(*args: Any) -> Tensor:
        files.append(plain(*args))
        return files[-1]

    def kept(*args: Any) -> Trainer:
        trainers.append(Trainer(*args))
        return trainers[-1]

    monkeypatch.setattr(optimizer, "mapped", noted)
    monkeypatch.setattr(command, "Trainer", kept)
    asked = f"--steps 2 --zero 3 --offload disk --offload-folder {tmp_path} --precision"
    assert train_on(2, asked, words) == 0
    addresses = {file.untyped_storage().data_ptr() for file in files}
    for trainer in trainers:
        shards = [shard for shard in trainer.parallel.kept if shard.numel()]
        assert shards
        assert {shard.untyped_storage().data_ptr() for shard in shards} <= addresses


def test_under_mpirun(tmp_path: Path) -> None:
    jobs = (
        "--precision bfloat16 --zero 2 --accumulate 2 --recompute full --offload disk",
        "--precision float16 --zero 1 --recompute selective --offload memory",
    )

    for number, words in enumerate(jobs):
        options = f"{RUN} {words} --save {tmp_path / str(number)} --verify"
        done = mpirun(2, PROGRAM, "train", *TINY, *options.split(), timeout=100)
        said = done.stdout + done.stderr
        assert (
            done.returncode == 0 and re.search("serial run +yes", said) and "Warning" not in said
        ), said
        assert train_on(2, RUN, words, f"--save {tmp_path / 'threads' / str(number)}") == 0
        ours, theirs = (
            [loss for _, loss in losses(folder / str(number) / "metrics.jsonl")]
            for folder in (tmp_path / "threads", tmp_path)
        )
        assert ours == pytest.approx(theirs, rel=1e-2)


# ---------------------------------------------------------------- 16 bits


SLOW = "--lr 1e-5 --steps 6 --warmup 0"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What slow training ends with in float32."""
    folder = tmp_path_factory.mktemp("wide")
    assert train_on(2, SLOW, f"--precision float32 --save {folder}") == 0
    return tensors(folder)


@pytest.mark.parametrize("words", ("", "--zero 1", "--zero 2 --offload disk", "--offload memory"))
def test_small_updates_add_up_in_the_masters(
    words: str, wide: dict[str, Tensor], tmp_path: Path
) -> None:
    """A step of 1e-5 is a tenth of what a bfloat16 weight of 0.02 can move by."""
    assert train_on(2, SLOW, f"--precision bfloat16 --save {tmp_path / 'narrow'}", words) == 0
    start = GPT(parse(TINY).gpt(256), torch.Generator().manual_seed(0)).embedding.weight.detach()
    narrow = tensors(tmp_path / "narrow")
    moved = (
        narrow["embedding.weight/master"] - start.bfloat16().float(),
        wide["embedding.weight"] - start,
    )
    assert (moved[0] - moved[1]).norm() < 0.3 * moved[1].norm()
    assert torch.equal(narrow["embedding.weight/master"].bfloat16(), narrow["embedding.weight"])


@pytest.mark.parametrize(
    ("ranks", "words"), [(1, ""), (3, ""), (2, "--zero 1"), (2, "--zero 2 --offload disk")]
)
def test_an_overflow_leaves_steps_out_and_the_scale_survives_a_resume(
    ranks: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The scale at first is so large that gradients, and the sums on their way, overflow."""
    monkeypatch.setattr(start, "LossScaler", partial(LossScaler, scale=2.0**23))
    folder = tmp_path / "run"
    words += f" --precision float16 --steps 8 --save-every 1 --keep 9 --save {folder}"
    assert train_on(ranks, words, "--verify") == 0, capsys.readouterr().out
    skipped, scale = re.findall(
        r"left out for an overflow +(\d+); the loss scale is (\d+)", capsys.readouterr().out
    )[0]
    assert 1 <= int(skipped) < 8 and int(scale) == 2 ** (23 - int(skipped))
    norms = [line["gradient_norm"] for line in metrics(folder / "metrics.jsonl")]
    assert norms.count(None) == int(skipped) and max(filter(None, norms)) < 10, "unscaled"
    finished = tensors(folder, 8)
    for step in range(2, 9):
        shutil.rmtree(folder / f"step-{step:08d}")
    assert train_on(ranks, words, "--resume") == 0
    assert same_bits(tensors(folder, 8), finished)


def test_clipping_sees_gradients_without_their_scale(tmp_path: Path) -> None:
    """And so does the update: it is that of float32."""
    for precision in ("float16", "float32"):
        assert (
            train_on(
                2, f"--clip 0.05 --steps 3 --precision {precision} --save {tmp_path / precision}"
            )
            == 0
        )
    ours, theirs = (
        tensors(tmp_path / precision, 3)["embedding.weight/exp_avg"]
        for precision in ("float16", "float32")
    )
    assert (ours - theirs).norm() < 0.01 * theirs.norm()


def test_gradients_that_overflow_at_every_scale_end_the_run_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "LossScaler", partial(LossScaler, scale=2.0**40, smallest=2.0**38))
    assert train_on(2, "--precision float16 --steps 8") == 2
    assert capsys.readouterr().err.startswith(
        "minidist train: gradients are infinite or not a number even at loss"
    )


# ---------------------------------------------------------------- what cannot be, and what it says


def test_the_headline_names_what_is_not_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        train_on(
            2, f"--steps 1 --recompute full --offload disk --offload-folder {tmp_path} --zero 1"
        )
        == 0
    )
    headline = capsys.readouterr().out.splitlines()[0]
    assert headline.endswith(f"(ZeRO-1), recompute full, the optimizer's state in {tmp_path}")
    assert not list(tmp_path.iterdir())
    assert main([*TINY, "--steps", "1", "--precision", "bfloat16", "--offload", "memory"]) == 0
    headline = capsys.readouterr().out.splitlines()[0]
    assert "in bfloat16," in headline and headline.endswith("the optimizer's state in memory")
    assert main([*TINY, "--steps", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("dp=1")


def test_a_folder_that_takes_no_files_is_found_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert train_on(2, f"--steps 1 --offload disk --offload-folder {tmp_path / 'file' / 'x'}") == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(
        f"minidist train: --offload-folder {tmp_path / 'file' / 'x'} cannot"
    )


def test_a_disk_that_is_full_for_one_rank_stops_all_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = os.posix_fallocate

    def allocate(descriptor: int, start: int, size: int) -> None:
        if threading.current_thread().name == "rank 1":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        claim(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    assert train_on(2, f"--offload disk --offload-folder {tmp_path} --zero 1") == 2
    said = capsys.readouterr()
    assert (
        said.err.startswith("minidist train: --offload disk: the optimizer's state needs ")
        and "step" not in said.out
    )


def test_a_precision_that_the_device_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checked, "device_of", lambda comm: torch.device("mps"))
    assert train_on(2, "--precision float64") == 2
    said = capsys.readouterr()
    assert (
        said.out == ""
        and "--precision float64: the device mps cannot compute in float64: use one of" in said.err
    )


def test_a_rank_computes_on_the_gpu_if_its_wire_carries_cuda_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)

    def program(comm: Communicator) -> list[torch.device]:
        before = checked.device_of(comm)
        comm.wire.carries_cuda = True
        return [before, checked.device_of(comm)]

    assert run(program, 1) == [[torch.device("cpu"), torch.device("cuda", 3)]]
