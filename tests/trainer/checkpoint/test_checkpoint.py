"""Checkpoints: a run that was killed, at whatever moment, ends with the bits of one that never
was.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from damage import cut, empty, flip
from training import RUN as BASE
from training import TINY, losses, same_bits, short_text, tensors, train_on

from minidist.cli.train import main
from minidist.full.checkpoint import restore, store
from minidist.full.checkpoint.lock import hold
from minidist.full.checkpoint.store import complete
from minidist.full.trainer.loop import Trainer

RUN = f"{BASE} --keep 9"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # 41 samples: an epoch ends within 6 steps of 8
    return short_text(tmp_path_factory.mktemp("text"), 700)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A folder with the checkpoints of all 6 steps of a run on 2 ranks that nothing disturbed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert train_on(2, RUN, f"--text {text} --steps 6 --save {folder}") == 0
    return folder


@pytest.fixture
def stopped(tmp_path: Path, finished: Path) -> Path:
    """The same folder, as a run leaves it that was killed in its fifth step."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    for name in ("step-00000005", "step-00000006"):
        shutil.rmtree(folder / name)
    (folder / ".unfinished-00000005").mkdir()
    (folder / ".unfinished-00000005" / "rank-0000.safetensors").write_text("half of i")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:5]) + lines[5][:20])
    return folder


def sentence(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line on stderr."""
    error = capsys.readouterr().err
    assert error.startswith("minidist train: ") and error.count("\n") == 1, error
    return error.removeprefix("minidist train: ").rstrip()


# ---------------------------------------------------------------- resume


def test_a_resumed_run_ends_with_the_same_bits(
    stopped: Path, finished: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_on(2, RUN, f"--text {text} --steps 6 --save {stopped} --resume") == 0
    assert same_bits(stopped / "step-00000006", finished / "step-00000006")
    assert losses(stopped / "metrics.jsonl") == losses(finished / "metrics.jsonl")
    assert [step for step, _ in losses(finished / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in stopped.iterdir()) == sorted(
        path.name for path in finished.iterdir()
    )
    assert "\nresumed after step 4\n" in capsys.readouterr().out


def test_each_rank_writes_its_own_shard_and_a_part_of_the_files_is_its_to_verify(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that did it all, with what others have brought it, would leave the same files."""
    writers: dict[int, set[int]] = {}
    verified: list[str] = []
    write, digest = store.write_shard, restore.digest

    def written(unfinished: Path, rank: int, pieces: Any) -> store.Written:
        writers.setdefault(threading.get_ident(), set()).add(rank)
        return write(unfinished, rank, pieces)

    def noted(file: Path) -> str:
        verified.append(file.name)
        return digest(file)

    monkeypatch.setattr(store, "write_shard", written)
    monkeypatch.setattr(restore, "digest", noted)
    words = f"{RUN} --zero 1 --text {text} --save {tmp_path / 'run'} --steps"
    assert train_on(3, words, "1") == 0
    assert sorted(map(sorted, writers.values())) == [[0], [1], [2]]
    assert not verified
    assert train_on(3, words, "2 --resume") == 0
    shards = [f"rank-{rank:04d}.safetensors" for rank in range(3)]
    assert sorted(verified) == ["index.json", *shards, "state.json"]


@pytest.mark.parametrize(
    ("ranks", "words"), [(1, ""), (3, "--strategy naive"), (5, "--accumulate 2")]
)
def test_resuming_on_another_number_of_ranks(
    ranks: int,
    words: str,
    stopped: Path,
    finished: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        train_on(ranks, RUN, words, f"--text {text} --steps 6 --save {stopped} --resume --verify")
        == 0
    )
    assert "same parameters as the serial run   yes" in capsys.readouterr().out
    ours, theirs = (tensors(folder / "step-00000006") for folder in (stopped, finished))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).abs().max() <= 1e-9 * tensor.abs().max(), name


def test_resuming_a_run_that_has_finished(
    finished: Path, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is trained or written; what comes after training is done."""
    shutil.copytree(finished, tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("step*/*")}
    words = f"--text {text} --steps 6 --save {tmp_path / 'run'} --resume --verify --sample 4"
    assert train_on(3, RUN, words) == 0
    out = capsys.readouterr().out
    assert "resumed after step 6; nothing is left to train" in out and "the model was given" in out
    assert "serial run   yes" in out and losses(tmp_path / "run" / "metrics.jsonl") == losses(
        finished / "metrics.jsonl"
    )
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("step*/*")} == before


def test_gradients_that_were_kept_back_and_are_left_out_are_named(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--text {text} --save {tmp_path / 'run'}"
    assert train_on(2, RUN, words, "--steps 2 --compress topk:0.1") == 0
    capsys.readouterr()
    assert train_on(2, RUN, words, "--steps 3 --resume") == 0
    headline = capsys.readouterr().out.splitlines()[1]
    assert headline.endswith("steps 2 -> 3, compress topk:0.1 -> none")


@pytest.mark.parametrize(
    ("words", "option", "named"),
    [
        ("--zero 3", "--zeropp", "steps 2 -> 3, zeropp True -> False"),
        ("--experts 4 --ep 2", "--ep-fp8", "steps 2 -> 3, ep_fp8 True -> False"),
        (
            "--local-steps 1 --outer-topk 0.1 --outer-momentum 0",
            "--tp 2",
            "steps 2 -> 3, tp 2 -> 1",
        ),
        ("--local-steps 1", "--tp 2", "steps 2 -> 3"),
    ],
)
def test_what_the_next_steps_lose_otherwise_is_named(
    words: str,
    option: str,
    named: str,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = f"--precision float32 {words} --text {text} --save {tmp_path / 'run'}"
    assert train_on(2, run, "--steps 2", option) == 0
    capsys.readouterr()
    assert train_on(2, run, "--steps 3 --resume") == 0
    assert capsys.readouterr().out.splitlines()[1].endswith(f"what they were: {named}")


def test_a_precision_that_is_said_at_last_has_not_changed(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--text {text} --save {tmp_path / 'run'}"
    assert train_on(1, words, "--steps 2") == 0
    capsys.readouterr()
    assert train_on(1, words, "--steps 3 --resume --precision float32") == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("what they were: steps 2 -> 3")


def test_options_may_change_and_are_named(
    stopped: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        f"--text {text} --steps 7 --save {stopped} --resume --lr 0.02 --batch 4 --strategy naive "
        "--keep 2"
    )
    assert train_on(2, RUN, words) == 0
    headline = capsys.readouterr().out.splitlines()[1]
    changed = "batch 8 -> 4, steps 6 -> 7, lr 0.01 -> 0.02"
    assert headline == f"resumed after step 4, with options that are not what they were: {changed}"
    assert [path.name for path in complete(stopped)] == ["step-00000006", "step-00000007"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (
            "--hidden 32",
            "belongs to another model: embedding.weight is float64 [256, 16] there and float64 "
            "[256, 32]",
        ),
        (
            "--layers 2",
            "belongs to another model: layers.1.attention.key.weight is missing there and float64 "
            "[16, 16]",
        ),
        ("--no-tied", "belongs to another model: head.weight is missing there"),
        (
            "--precision float32",
            "embedding.weight is float64 [256, 16] there and float32 [256, 16] here: use",
        ),
        (
            "--heads 4",
            "belongs to another model: heads is 2 there and 4 here: use the options it was "
            "trained with",
        ),
        ("--sequence 8", "belongs to another model: sequence is 16 there and 8 here"),
        ("--held-out 0.5", "cannot be continued: the saved position belongs to other samples"),
        ("--seed 1", "cannot be continued: the saved sampler dealt with"),
        ("--by-length", "cannot be continued: "),
        (
            "--steps 3",
            "step-00000004 has 4 steps behind it, more than --steps 3: use --steps 4 to look at "
            "it, or more",
        ),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_named(
    words: str, complaint: str, stopped: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(stopped.rglob("*"))
    assert train_on(2, RUN, f"--text {text} --steps 6 --save {stopped} --resume", words) == 2
    message = sentence(capsys)
    assert complaint in message and str(stopped / "step-00000004") in message
    assert sorted(stopped.rglob("*")) == before


def test_a_checkpoint_under_the_name_of_another_step_is_refused(
    stopped: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(stopped / "step-00000002", stopped / "step-00000005")
    assert train_on(2, RUN, f"--text {text} --steps 6 --save {stopped} --resume") == 2
    message = sentence(capsys)
    assert "step-00000005 was written after step 2, and would hide newer ones" in message
    assert message.endswith("rename it step-00000002")


def test_another_text_is_refused(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_on(2, RUN, f"--steps 6 --save {stopped} --resume") == 2
    assert "use the same text, tokenizer and sequence length" in sentence(capsys)


def test_a_new_run_does_not_touch_the_checkpoints_of_another(
    stopped: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    assert train_on(2, RUN, f"--text {text} --steps 6 --save {stopped}") == 2
    assert "holds step-00000004: add --resume to go on, or save to another folder" in sentence(
        capsys
    )
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before


# ---------------------------------------------------------------- one run at a time


@pytest.mark.parametrize("words", ["--resume --steps 6", "--steps 6"])
def test_a_second_run_in_the_same_folder_is_refused_before_it_writes(
    words: str, stopped: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--resume" not in words:
        for path in complete(stopped):
            shutil.rmtree(path)
    with hold(stopped):
        before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
        assert train_on(2, RUN, words, f"--text {text} --save {stopped}") == 2
        assert sentence(capsys).startswith(
            f"--save {stopped} is in use by another run: let it end, or save elsewhere"
        )
        assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before
    assert train_on(2, RUN, words, f"--text {text} --save {stopped}") == 0


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        kept = hold(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)
        kept.close()
    os.waitpid(child, 0)
    hold(tmp_path).close()


def test_a_file_system_without_locks_is_said_and_is_no_reason_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    assert train_on(2, RUN, f"--steps 1 --save {tmp_path / 'a'}") == 0
    assert (
        sentence(capsys)
        == f"{tmp_path / 'a'} cannot be locked (No locks available): let no other run save there"
    )


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize(
    "name", ["rank-0000.safetensors", "index.json", "state.json", "SHA256SUMS"]
)
@pytest.mark.parametrize("harm", [cut, flip, empty, Path.unlink])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_named(
    name: str,
    harm: Callable[[Path], None],
    stopped: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    harm(stopped / "step-00000004" / name)
    words = f"--text {text} --steps 4 --save {stopped} --resume"
    if name == "SHA256SUMS" and harm is cut:  # the last line has lost its end: nothing that matters
        assert train_on(2, RUN, words) == 0
        return
    assert train_on(2, RUN, words) == 2
    message = sentence(capsys)
    assert "step-00000004" in message and message.endswith(
        "remove step-00000004 to resume from step-00000003"
    )
    assert name in message or name == "SHA256SUMS"
    shutil.rmtree(stopped / "step-00000004")
    assert train_on(2, RUN, words) == 0


def test_the_last_checkpoint_left_is_damaged(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished / "step-00000006", tmp_path / "step-00000006")
    cut(tmp_path / "step-00000006" / "rank-0000.safetensors")
    assert train_on(1, RUN, f"--save {tmp_path} --resume") == 2
    assert sentence(capsys).endswith("there is no earlier one: start afresh, with another --save")


def test_a_checkpoint_may_be_damaged_again(
    stopped: Path, text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that has been started again sets it aside, beside that of an earlier start."""
    monkeypatch.setenv("MINIDIST_RESTARTS", "2")
    newest = stopped / "step-00000004"
    flip(newest / "state.json")
    shutil.copytree(newest, stopped / "damaged-step-00000004")
    words = f"--text {text} --steps 4 --save {stopped}"
    with monkeypatch.context() as refusing:
        read_only = OSError(errno.EROFS, os.strerror(errno.EROFS))
        refusing.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(read_only))
        assert train_on(2, RUN, words) == 2
    fix = f"{newest} is damaged (Read-only file system): remove {newest} yourself"
    assert sentence(capsys) == fix
    assert train_on(2, RUN, words) == 0
    assert sentence(capsys).endswith("it is damaged-step-00000004-2 now")


def test_the_sums_are_those_of_sha256sum(finished: Path) -> None:
    folder = finished / "step-00000006"
    lines = (folder / "SHA256SUMS").read_text().splitlines()
    assert lines == [
        f"{store.digest(folder / name)}  {name}"
        for name in sorted(p.name for p in folder.iterdir())
        if name != "SHA256SUMS"
    ]
    assert json.loads((folder / "state.json").read_text())["step"] == 6


# ---------------------------------------------------------------- writing


@pytest.fixture
def small_files() -> Iterator[Callable[[], None]]:
    """Make every file that grows beyond 50 kB fail, as on a full disk, from the call on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_sentence_and_loses_nothing(
    stopped: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small_files: Callable[[], None],
) -> None:
    train_step = Trainer.step

    def step(self: Trainer, number: int, *rest: object) -> tuple[float, float]:
        if number == 5:
            small_files()
        return train_step(self, number, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "step", step)
    assert train_on(2, RUN, f"--text {text} --steps 6 --save {stopped} --resume") == 2
    message = sentence(capsys)
    last = complete(stopped)[-1].name  # the fifth, if it was written before the disk was full
    assert last in ("step-00000004", "step-00000005") and "cannot be written (" in message
    assert "File too large" in message and message.endswith(
        f"{last} is intact: --resume continues from it"
    )
    assert not list(stopped.glob(".unfinished*"))


def test_nothing_is_saved_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, "--steps", "1"]) == 0
    assert list(tmp_path.iterdir()) == []
