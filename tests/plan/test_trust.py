"""How far an answer can be trusted: ranges, ranks, optimism, and named runs as they were published."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from minidist.cli.plan import command
from minidist.cli.plan.as_published import planned
from minidist.cli.plan.command import main
from minidist.plan.device import machine, table
from minidist.plan.memory import bytes_held
from minidist.plan.model import model
from minidist.plan.run import Setup
from minidist.plan.search import Found
from minidist.plan.trust import kinds
from minidist.plan.trust.kinds import Range, equal, kind_of, range_of, ranks_of, said_of
from minidist.plan.trust.runs import as_published, gpu_hours, optimism, shares, stored

RUN = Setup(model("llama-8b"), machine("a100:16"), 4096, 256)
ASKED = ["--model", "llama-8b", "--cluster", "a100:16", "--tokens", "100B", "--batch", "1M"]


# ---------------------------------------------------------------- ranges


def test_a_kind_is_what_rows_share() -> None:
    mixture = replace(RUN, model=model("mixtral-8x7b"), machine=machine("h100:16"))
    two = replace(RUN, machine=machine("h100:32+a100:32@12.5e9"))
    assert kind_of(RUN) == "ampere, dense, 16 bits"
    assert kind_of(mixture) == "hopper, experts, 16 bits"
    assert kind_of(replace(RUN, autocast="bfloat16")) == "ampere, dense, autocast"
    assert kind_of(two).endswith(", two sites") and range_of(two) is None
    assert "never checked on such a machine" in said_of(two)


def test_ranges_that_overlap_make_equal_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {"kinds": {kind_of(RUN): {"time": Range(9, 2, 0.9, 1.1, 5.0, 0.0)._asdict()}}}
    monkeypatch.setattr(kinds, "errors", lambda: stored)

    def ranks(run: Setup, *seconds: float) -> list[int]:
        return ranks_of([Found(run, {"computing": each}, {}) for each in seconds])

    assert ranks(RUN, 1.0, 1.21, 1.3, 2.0) == [1, 1, 2, 4]
    assert ranks(replace(RUN, machine=machine("tpu-v5p:16")), 1.0, 1.01, 1.01) == [1, 2, 2]
    stored["kinds"].clear()
    assert ranks(RUN, 1.0, 1.001, 1.3, 2.0) == [1, 2, 3, 4], "nothing is known to be equal"


def test_text_json_and_picture_say_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(command, "draw_plan", lambda **said: drawn.update(said))
    assert main([*ASKED, "--format", "json", "--picture", "x.svg"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert main(ASKED) == 0
    said = capsys.readouterr().out
    first = tree["layouts"][0]
    low, high = first["range"]
    assert low < high and f"{low:,.2f} to {high:,.2f} s" in said
    assert tree["trust"]["said"] in said and tree["trust"]["said"] in drawn["said"]
    assert [tuple(each["range"]) for each in tree["layouts"]] == drawn["ranges"]
    shown = re.findall(r"^(\d) tp=.*?  +(\d) ", said, re.MULTILINE)
    shown += re.findall(r"^(\d) (?:pp|dp)=.*?  +(\d) ", said, re.MULTILINE)
    assert sorted(int(rank) for _, rank in shown) == [each["rank"] for each in tree["layouts"]]
    for place, (each, name) in enumerate(
        zip(tree["layouts"], drawn["names"], strict=True), start=1
    ):
        assert name.startswith(f"{place} (rank {each['rank']})")
    same = [str(place) for place, each in enumerate(tree["layouts"], 1) if each["rank"] == 1]
    assert (f"equal: {', '.join(same[:-1])} and {same[-1]} have rank 1" in said) == (len(same) > 1)
    assert tree["trust"]["equal"] in drawn["said"]


def test_one_layout_alone_is_equal_to_nothing() -> None:
    found = Found(RUN, {"computing": 1.0}, bytes_held(RUN))
    assert equal([found]) == "" != equal([found, found])


# ---------------------------------------------------------------- optimism, named runs


def test_an_answer_says_how_optimistic_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ASKED) == 0
    said = capsys.readouterr().out
    then = shares("planned")
    assert f"{len(then)} published runs" in said and f"{then[0]:.2f} to {then[-1]:.2f}" in said
    assert "goodput is" not in said and "goodput is 90.0%" in optimism(0.9, 5.0)
    assert main([*ASKED, "--mtbf", "5"]) == 0
    assert "with a failure every 5.0 h goodput is" in capsys.readouterr().out
    assert any(share < 0.6 for share in shares("today")) and len(then) >= 12


def test_every_named_run_has_a_source_and_no_number_of_its_own() -> None:
    facts = {
        "says",
        "source",
        "unsaid",
        "model",
        "sizes",
        "cluster",
        "machine",
        "sequence",
        "batch",
        "tokens",
    }
    facts |= {"software", "layout", "searched", "fp8", "gpu_hours", "step_seconds"}
    for name, said in table("runs").items():
        assert said.keys() <= facts and len(said["source"]) > 20, name
        assert ("model" in said) != ("sizes" in said), name
        assert ("cluster" in said) != ("machine" in said), name
        assert ("gpu_hours" in said) != ("step_seconds" in said), name
    assert stored().keys() == table("runs").keys()


def test_published_layouts_are_planned_as_the_page_says() -> None:
    """Those that need no search, each in milliseconds; `plan --as-published` writes them anew."""
    looked = 0
    for name, said in table("runs").items():
        each = stored()[name]
        if not said.get("searched"):
            published, hours = gpu_hours(said, as_published(said))
            assert round(published) == each["published"], name
            assert hours == pytest.approx(each["planned"], rel=0.01), name
            looked += 1
    assert looked >= 7


@pytest.mark.soak
def test_all_named_runs_are_planned_as_the_page_says() -> None:
    for name, said in table("runs").items():
        found = planned(said)
        for of in ("planned", "today"):
            assert found[of] == pytest.approx(stored()[name][of], rel=0.01), name


def test_the_command_plans_one_of_them() -> None:
    words = [sys.executable, "-m", "minidist", "plan", "--as-published", "--only", "bloom-176b"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    each = stored()["bloom-176b"]
    assert "BLOOM 176B" in said and f"{each['published']:,} h" in said and "Luccioni" in said
