"""`bench engines`: every engine gives the same virtual time, to the last digit."""

from __future__ import annotations

import importlib.util
import json

import pytest

from minidist.bench import elastic, engines, main

RING = 2 * 3 * (3e-6 + (1 << 30) / 4 / 450e9)  # four ranks of a node, 2 (P - 1) messages


def measured(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, float]:
    """Return the virtual time by engine that `bench engines` prints for one program."""
    assert main(f"engines --json - {words}".split()) == 0
    return {each["engine"]: each["clock"] for each in json.loads(capsys.readouterr().out)}


def test_engines_agree_on_the_virtual_clock(capsys: pytest.CaptureFixture[str]) -> None:
    clocks = measured(capsys, "--ranks 4 --programs ring")
    assert list(clocks) == ["threads", "cooperative"]
    assert len(set(clocks.values())) == 1
    assert clocks["threads"] == pytest.approx(RING, rel=1e-12)


@pytest.mark.soak  # two processes that trace a model; smaller programs are compared in tests/comm
def test_engines_agree_on_a_step_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    clocks = measured(capsys, "--programs --step 2x1x1")
    assert list(clocks) == ["threads", "cooperative"]
    assert clocks["threads"] == clocks["cooperative"] > 0


def test_a_step_is_three_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["engines", "--step", "8x8"])
    assert "--step 8x8: write dp x pp x tp, as in 8x8x8" in capsys.readouterr().err


def test_the_benches_with_options_of_their_own_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`bench --help` left them out, and their own help broke off in the middle of its sentence."""
    for words, said in (
        ("--help", "engines and elastic have their own --help"),
        ("engines --help", "simulated ranks, engine by engine."),
        ("elastic --help", "and where the seconds go."),
    ):
        with pytest.raises(SystemExit, match="0"):
            main(words.split())
        assert said in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit, match="2"):
        main(["engine"])
    assert "nccl, engines, elastic, all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "absent", "said"),
    [
        ("engines --json /no/such/file", "", "/no/such/file cannot be written (No such file"),
        ("engines --step 1x16x1", "", "1x16x1: the model has 8 layers and 8 heads, so pp is at"),
        ("engines --step 1x1x3", "", "1x1x3: the model has 8 layers and 8 heads, so pp is at"),
        ("engines --programs", "", "nothing to measure: give --programs, or --step"),
        ("elastic --json /no/such/file", "", "/no/such/file cannot be written (No such file"),
        ("elastic", "tensorboardX", "pip install tensorboardX"),
    ],
)
def test_what_would_fail_after_minutes_is_refused_at_once(
    words: str,
    absent: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measures(*_: object) -> None:
        raise AssertionError("it has begun to measure")

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != absent and found(name))
    monkeypatch.setattr(engines, "get_context", measures)
    monkeypatch.setattr(elastic, "seconds_of", measures)
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert said in capsys.readouterr().err
