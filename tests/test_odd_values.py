"""Odd values at every door: each flag and each field of a file takes them, or says in a sentence
why not. No traceback.

Values are the same in every run. What would train is stopped where training would begin.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from test_launch import start
from training import TINY, short_text, train_on

import minidist
from minidist.__main__ import main
from minidist.bench import options as bench
from minidist.cli import launch
from minidist.cli.train import train
from minidist.full.checkpoint import restore, store
from minidist.full.data.files import FileError, at, read_tree
from minidist.full.model import GPT, GPTConfig
from minidist.full.options import NOT_NEGATIVE, SECONDS, read_number
from minidist.full.trainer.config import ConfigError
from minidist.full.trainer.flags import build_parser, read_toml
from minidist.full.trainer.foreign.llama import load_llama, read_llama_config, save_llama
from minidist.full.trainer.foreign.names import DEEPSPEED, MEGATRON
from minidist.full.trainer.foreign.options import read_deepspeed
from minidist.full.trainer.loop import Trainer
from minidist.further import Config, parse

NO_NUMBERS = ["nan", "inf", "1e400", "", "²", "9" * 400, "None"]
EXTREMES = ["-1", "0", "1" + "0" * 18, "1e308"]
WORDS = [*NO_NUMBERS, *EXTREMES]
DEEP = "[" * 50_000 + "]" * 50_000
VALUES = [
    "NaN",
    "-Infinity",
    "1e400",
    "9" * 400,
    "9" * 5000,
    "-1",
    "0",
    "1.5",
    "null",
    "true",
    '"²"',
    '""',
    "[]",
    "[[1]]",
    "{}",
    '{"a": {"a": 1}}',
    DEEP,
    DEEP[:200],
    '"\\u0000"',
    f'"{"x" * 300}"',
]


class WouldTrain(Exception):
    """All doors are passed."""


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise WouldTrain

    monkeypatch.setattr(Trainer, "run", stop)


def outcome(*words: str) -> str:
    """Return what `train` says to a command line, or "" if it would train. A traceback is a failed
    test.
    """
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            assert minidist.run(lambda comm: train([*TINY, *words], comm), 1) == [2], words
        except WouldTrain:
            return ""
    said = err.getvalue()
    assert said.startswith("minidist train: ") and said.count("\n") == 1 and len(said) < 1200, said
    return said


# ---------------------------------------------------------------- flags


def test_every_numeric_flag_of_train(no_training: None) -> None:
    numeric = [
        action.option_strings[0]
        for action in build_parser("x", Config)._actions
        if action.metavar in ("INT", "FLOAT")
    ]
    assert len(numeric) > 30
    for name in numeric:
        for word in NO_NUMBERS:
            with pytest.raises(ConfigError, match=r"must be|is too large"):
                parse([f"{name}={word}"])
        for word in EXTREMES:
            outcome(f"{name}={word}")


@pytest.mark.parametrize("name", ["--limit", "--timeout", "-n"])
def test_every_number_of_launch(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for word in [*WORDS, "99999999999999999999"]:
        if word == "1e308" and name == "-n":
            continue
        with pytest.raises(SystemExit) as left:
            launch.main([f"{name}{'=' * (len(name) > 2)}{word}", "no-such-file.py"])
        said = capsys.readouterr().err
        assert left.value.code == 2 and re.match(
            r"minidist launch: .* (must be|is too large|expected).*\n$", said
        ), said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("copy --sizes 0", "--sizes: '0' must be from 1 B to 64 GiB"),
        (f"copy --sizes {'9' * 400}", "is not a size: write 4096"),
        ("copy --sizes ²", "'²' is not a size"),
        ("copy --ranks 0", "--ranks: '0' must be from 1 to 10,000"),
        ("copy --rounds -1", "--rounds: '-1' must be 0 or more"),
        ("ddp --hidden 8,x", "--hidden: 'x' must be a whole number"),
        (f"copy --json /tmp/{'x' * 300}", "cannot be written (File name too long)"),
    ],
)
def test_numbers_of_bench(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        bench.parse(words.split())
    err = capsys.readouterr().err
    assert (
        left.value.code == 2
        and err.startswith("minidist bench: ")
        and said in err
        and err.count("\n") == 1
    )


def test_the_limit_of_the_environment(tmp_path: Path) -> None:
    """Refused by the command in a sentence, on rank 0 alone; and by a program with an error of its
    launch.
    """
    job = start("train", MINIDIST_LIMIT="abc", PMI_RANK="0")
    assert (
        job.returncode == 2
        and job.stderr == "minidist train: MINIDIST_LIMIT=abc must be a number\n"
    )
    for limit in (float("nan"), -1, 1e300, "²"):
        with pytest.raises(
            minidist.full.comm.LaunchError, match=r"limit=.* (must be|is too large)"
        ):
            minidist.init(limit=limit)  # type: ignore[arg-type]


# ---------------------------------------------------------------- files


def test_every_number_of_megatron() -> None:
    chance = random.Random(0)
    for row in MEGATRON:
        for word in chance.sample(WORDS, 3) if row.kind in (int, float) else []:
            with contextlib.suppress(ConfigError):
                parse(["--megatron", f"{row.name}={word}"])


def test_every_option_of_a_toml_file(tmp_path: Path) -> None:
    file, chance = tmp_path / "x.toml", random.Random(0)
    odd = [
        "nan",
        "inf",
        "-1",
        "0",
        "1e400",
        "9" * 400,
        "0x" + "f" * 5000,
        "[]",
        "{}",
        '""',
        '"²"',
        DEEP,
        "1979-05-27",
    ]
    for section, cls in Config.kinds().items():
        for option in fields(cls):
            for value in chance.sample(odd, 5):
                file.write_text(f"[{section}]\n{option.name} = {value}\n")
                with contextlib.suppress(ConfigError):
                    Config(
                        **{
                            name: Config.kinds()[name](**found)
                            for name, found in read_toml(file, Config).items()
                        }
                    )


def test_every_key_of_a_deepspeed_file(tmp_path: Path) -> None:
    file, chance = tmp_path / "x.json", random.Random(0)
    for row in DEEPSPEED:
        for value in chance.sample(VALUES, 5):
            keys = row.name.split(".")
            file.write_text("".join(f'{{"{key}": ' for key in keys) + value + "}" * len(keys))
            with contextlib.suppress(ConfigError):
                sections, _ = read_deepspeed(file, {}, {})
                Config(
                    **{name: Config.kinds()[name](**options) for name, options in sections.items()}
                )


def test_every_key_of_a_llamas_folder(tmp_path: Path) -> None:
    save_llama(GPT(GPTConfig(layers=1, hidden=16, heads=2)), tmp_path)
    file = tmp_path / "config.json"
    right = json.loads(file.read_text())
    for key in [*right, "rope_scaling"]:
        for value in VALUES:
            file.write_text(json.dumps(right | {key: "@"}).replace('"@"', value))
            with contextlib.suppress(ValueError):
                read_llama_config(tmp_path)
    for key, value in (("rope_theta", None), ("rope_theta", "1e4"), ("rope_parameters", [1])):
        file.write_text(json.dumps(right | {"rope_parameters": None} | {key: value}))
        if value is None:
            assert read_llama_config(tmp_path).rope_theta == 10_000
        else:
            with pytest.raises(
                ValueError, match=rf"config.json has {key} = .*, which must be a (number|section)"
            ):
                read_llama_config(tmp_path)
    file.write_text(json.dumps(right))
    (tmp_path / "model.safetensors").unlink()
    for value in VALUES:
        (tmp_path / "model.safetensors.index.json").write_text(
            f'{{"weight_map": {{"norm": {value}}}}}'
        )
        with pytest.raises((ValueError, OSError)):
            load_llama(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd")
    text = short_text(folder, 700)
    assert train_on(1, f"--steps 1 --precision float16 --text {text} --save {folder / 'run'}") == 0
    return folder / "run"


def rewritten(path: Path, name: str, content: str) -> None:
    """Write a file of a checkpoint, whose checksum is right again."""
    (path / name).write_text(content)
    sums = dict(
        reversed(line.split("  ")) for line in (path / "SHA256SUMS").read_text().splitlines()
    )  # type: ignore[misc]
    sums[name] = store.digest(path / name)
    (path / "SHA256SUMS").write_text(
        "".join(f"{checksum}  {file}\n" for file, checksum in sums.items())
    )


def places(tree: Any, *keys: Any) -> Iterator[tuple[Any, ...]]:
    """Yield where something stands in a tree."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*keys, key)
        if isinstance(value, dict | list):
            yield from places(value, *keys, key)


def with_value(tree: Any, keys: tuple[Any, ...], value: str | None) -> str:
    """Return a tree as text, with something else at one place, or nothing."""
    tree = json.loads(json.dumps(tree))
    inner = tree
    for key in keys[:-1]:
        inner = inner[key]
    if value is None:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = "@"
    return json.dumps(tree).replace('"@"', value or "")


def test_every_field_of_a_checkpoints_state(run: Path, no_training: None) -> None:
    words = f"--steps 1 --precision float16 --text {run.parent / 'short.txt'} --save {run} --resume".split()
    path, chance = store.newest(run), random.Random(0)
    right = json.loads((path / "state.json").read_text())
    used = [
        keys for keys in places(right) if keys[0] != "config" or len(keys) < 3 or keys[-1] == "init"
    ]
    for keys in used:
        for value in [None, *chance.sample(VALUES, 2)]:
            rewritten(path, "state.json", with_value(right, keys, value))
            outcome(*words)
    for name in ("config", "model", "batches", "step"):
        rewritten(path, "state.json", with_value(right, (name,), None))
        assert "state.json" in outcome(*words), name
    rewritten(path, "state.json", with_value(right, ("batches", "position"), "99999"))
    assert "position = 99999 is none among" in outcome(*words)
    rewritten(path, "state.json", json.dumps(right, indent=1))
    assert outcome(*words) == ""


def test_every_field_of_a_checkpoints_index(run: Path) -> None:
    path, chance = store.newest(run), random.Random(0)
    right = (path / "index.json").read_text()
    tree = json.loads(right)
    for keys in chance.sample(list(places(tree)), 60):
        for value in [None, *chance.sample(VALUES, 2)]:
            (path / "index.json").write_text(with_value(tree, keys, value))
            with contextlib.suppress(store.CheckpointError):
                restore.names(path)
    (path / "index.json").write_text(right)


def test_a_pipe_in_place_of_a_file_is_found_without_opening_it(run: Path, tmp_path: Path) -> None:
    """Opening it would wait for whoever writes to it."""
    os.mkfifo(tmp_path / "pipe")
    for option in ("--text", "--config", "--deepspeed", "--tokenizer"):
        assert "no regular file" in outcome(option, str(tmp_path / "pipe")), option
    shutil.copytree(run, tmp_path / "run")
    for name in ("rank-0000.safetensors", "index.json", "SHA256SUMS"):
        path = store.newest(tmp_path / "run") / name
        aside = path.rename(tmp_path / name)
        os.mkfifo(path)
        assert "no regular file" in outcome("--save", str(tmp_path / "run"), "--resume"), name
        assert stat.S_ISFIFO(path.stat().st_mode)
        path.unlink()
        aside.rename(path)


def test_a_name_that_is_too_long_wherever_one_is_taken(
    no_training: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = f"{tmp_path}/{'x' * 300}"
    for words in ("--save @", "--save @ --resume", "--init @", "--metrics @", "--trace @", "--text @", "--config @",
                  "--tokenizer @", "--deepspeed @", "--offload disk --offload-folder @"):  # fmt: skip
        assert "File name too long" in outcome(*words.replace("@", long).split()), words
    for argv in (["export", long, "--to", "x"], ["launch", "-n", "1", long]):
        assert main(argv) == 2
        assert capsys.readouterr().err.count("\n") == 1
    file = tmp_path / "nul.toml"
    for name in ("save", "metrics", "trace", "init"):
        file.write_text(f'[run]\n{name} = "a\\u0000b"\n')
        assert outcome("--config", str(file)), name


def test_a_folder_that_looks_like_a_checkpoint_is_none(tmp_path: Path) -> None:
    for name in ("step-²", "step-", "step-1x", "step-٣"):
        (tmp_path / name).mkdir()
    assert store.complete(tmp_path) == []


# ---------------------------------------------------------------- the readers


def test_numbers() -> None:
    assert (
        read_number(" 12", int) == 12
        and read_number(3, float) == 3.0
        and read_number("1e-3", float) == 1e-3
    )
    for written, kind, words in (
        ("1.5", int, "must be a whole number"), (1.0, int, "must be a whole number"), (True, int, "must be a whole"),
        (None, float, "must be a number"), (10**400, float, "is too large"), (-(10**400), int, "is too large"),
        ("-inf", float, "is too large"), ("nan", float, "must be a number"), ("-1", float, "must be above 0 and at"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            read_number(written, kind, SECONDS if words.endswith("at") else None)


def test_values_of_a_tree(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text('{"a": {"b": [1, 2], "c": "x"}, "n": null}')
    tree = read_tree(file)
    assert (
        at(tree, "a", "b", kind=tuple[int, ...]) == (1, 2)
        and at(tree, "n", kind=int, default=7) == 7
    )
    for keys, kind, words in (
        (("a", "b", "c"), int, r"^has a.b = \[1, 2\], which must be a section"),
        (("a", "c"), int, "^has a.c = 'x', which must be a whole number$"),
        (("a", "d", "e"), int, "^does not say a.d$"),
        (("n",), int, "^does not say n$"),
    ):
        with pytest.raises(FileError, match=words):
            at(tree, *keys, kind=kind, limit=NOT_NEGATIVE)
    file.write_text('{"a": [{"b": 1e999}]}')
    with pytest.raises(FileError, match=r"^has a.0.b = inf, which is too large$"):
        read_tree(file)
    file.write_text('{"a": ' + "[" * 100 + "]" * 100 + "}")
    with pytest.raises(FileError, match=r"^is nested more than 64 deep at a\.0\.0"):
        read_tree(file)
    with file.open("wb") as large:
        large.truncate(1 << 40)
    with pytest.raises(FileError, match="too large: 1,099,511,627,776 bytes"):
        read_tree(file)
