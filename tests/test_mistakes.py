"""A user's mistake is one clear sentence, on every number of ranks, before any work."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from ranks import mpirun
from training import PROGRAM, TINY, short_text

import minidist
from minidist.cli.train import train
from minidist.full.data.options import DataOptions
from minidist.full.data.text import load_text, split

# each Python has its own text
TO_TRAIN_ON, _ = split(np.frombuffer(load_text(), np.uint8), DataOptions.held_out)
MISTAKES = {
    "no such flag": ("--layer 1", "there is no option --layer: did you mean --layers?"),
    "layout": ("--dp 4", "dp = 4, but 3 ranks were started: use mpirun -n 4, or --dp 3"),
    "missing text": (
        "--text {folder}/none",
        "cannot read .*none .No such file or directory.: check the path given to",
    ),
    "empty text": (
        "--text {folder}/empty",
        "empty is empty: give --text a file with something in it",
    ),
    "short text": (
        "--text {folder}/short",
        "short has 9 tokens, but one sequence of T = 16 inputs needs 17: give more",
    ),
    "long sequence": (
        "--sequence 10000000",
        f"the built-in text has {len(TO_TRAIN_ON)} tokens, but one sequence of T = 10000000",
    ),
    "no tokenizer": (
        "--tokenizer {folder}/short",
        "short is not a tokenizer .*: --tokenizer needs the tokenizer.json",
    ),
    "not utf-8": (
        "--tokenizer {folder}/tokenizer.json --text {folder}/latin1",
        "the text is not UTF-8 .*byte 0xf6 in position 2",
    ),
    "not TOML": ("--config {folder}/short", "short is not TOML: "),
    "unwritable save": (
        "--save {folder}/short/run",
        "--save .*run cannot be written .Not a directory.: give another",
    ),
    "save is a file": (
        "--save {folder}/short",
        "--save .*short cannot be written .File exists.: give another path",
    ),
    "unwritable trace": (
        "--trace {folder}",
        "--trace .* cannot be written .Is a directory.: give another path",
    ),
    "unwritable metrics": (
        "--metrics {folder}/short/m",
        "--metrics .*m cannot be written .*: give another path",
    ),
    "nothing to resume": (
        "--resume --save {folder}/run",
        "--resume finds no checkpoint in .*run: start without it",
    ),
    "too large": (
        "--hidden 1000000",
        "12,000,531,000,000 parameters, .* need 576,025 GB for the ranks of this machine",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_on_rank_0_and_status_2_on_all(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any work: nothing was printed, and no folder made."""
    words, complaint = MISTAKES[mistake]
    (tmp_path / "empty").touch()
    (tmp_path / "short").write_text("too short")
    (tmp_path / "latin1").write_bytes("Größe ".encode("latin-1") * 100)
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    before = sorted(tmp_path.rglob("*"))
    argv = [*TINY, *words.format(folder=tmp_path).split()]
    assert minidist.run(lambda comm: train(argv, comm), 3) == [2, 2, 2]
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    assert re.match(f"minidist train: .*{complaint}", err), err
    assert sorted(tmp_path.rglob("*")) == before


TOKENIZER = """{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
    "pre_tokenizer": null, "post_processor": null, "decoder": null,
    "model": {"type": "BPE", "vocab": {"G": 0, "r": 1, "e": 2}, "merges": []}}"""


def test_a_mistake_that_only_one_rank_meets_stops_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when the text lies on the disk of one node only."""

    def differently(comm: minidist.Communicator) -> int:
        return train([*TINY, *(["--text", "/no/such/file"] if comm.rank == 2 else [])], comm)

    assert minidist.run(differently, 3) == [2, 2, 2]
    out, err = capsys.readouterr()
    assert (
        out == ""
        and err.startswith("minidist train: cannot read /no/such/file")
        and err.count("\n") == 1
    )


def test_a_mistake_under_mpirun(tmp_path: Path) -> None:
    done = mpirun(2, PROGRAM, "train", *TINY, "--dp", "4", "--text", str(short_text(tmp_path)))
    assert done.returncode == 2 and done.stdout == ""
    assert (
        done.stderr
        == "minidist train: dp = 4, but 2 ranks were started: use mpirun -n 4, or --dp 2\n"
    )
