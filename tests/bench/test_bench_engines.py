"""`bench engines`: every engine gives the same virtual time, to the last digit."""

from __future__ import annotations

import json

import pytest

from minidist.bench import main

RING = 2 * 3 * (3e-6 + (1 << 30) / 4 / 450e9)  # four ranks of a node, 2 (P - 1) messages


def test_engines_agree_on_the_virtual_clock(capsys: pytest.CaptureFixture[str]) -> None:
    words = "engines --ranks 4 --programs ring --step 2x1x1 --json -"
    assert main(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    named = [(each["program"], each["engine"]) for each in found]
    three = [("ring", engine) for engine in ("threads", "cooperative", "greenlets")]
    assert named == [*three, ("gpt", "threads"), ("gpt", "cooperative")]
    ring, step = ({each["clock"] for each in part} for part in (found[:3], found[3:]))
    assert len(ring) == len(step) == 1 and min(step) > 0
    assert min(ring) == pytest.approx(RING, rel=1e-12)


def test_a_step_is_three_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["engines", "--step", "8x8"])
    assert "--step 8x8: write dp x pp x tp, as in 8x8x8" in capsys.readouterr().err
