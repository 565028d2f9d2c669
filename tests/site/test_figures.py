"""The figures' numbers are those that the package gives: it runs again, and they are compared."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "docs/site"))
from figures.fragment import DATA, data_of, fragment
from figures.shapes import PALETTE
from make_figures import NAMES, main

SAMPLES = {
    "collectives": [("1 KiB", "4"), ("1 MiB", "16"), ("1 GiB", "8")],
    "planner": [("llama-7b", "h100:8", "seconds of a step"), ("llama-7b", "h100:8", "GB of a GPU")],
}
"""Of figures whose runs take long; the long run of the tests does all."""


def states_again(name: str, keys: list[tuple[str, ...]] | None) -> dict[str, Any]:
    """Run the package for some states of a figure, or for all."""
    figure = importlib.import_module(f"figures.{name}").FIGURE
    chosen = keys or list(figure.combinations())
    again = {"/".join(key): figure.draw(*key).as_json() for key in chosen}
    return dict(json.loads(json.dumps(again)))


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_come_out_again(name: str) -> None:
    committed = data_of(name)["states"]
    again = states_again(name, SAMPLES.get(name))
    assert again and {key: committed[key] for key in again} == again, (
        f"python docs/site/make_figures.py {name} writes them anew"
    )


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SAMPLES)
def test_all_numbers_come_out_again(name: str) -> None:
    assert data_of(name)["states"] == states_again(name, None)


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_says_what_it_is_and_what_made_it(name: str) -> None:
    """And every combination of choices has its picture, whose blocks fill the rows to no more than
    the axis.
    """
    data, html = data_of(name), fragment(name)
    figure = importlib.import_module(f"figures.{name}").FIGURE
    for key, value in json.loads(json.dumps(figure.head())).items():
        assert data[key] == value
    assert set(data["states"]) == {"/".join(key) for key in figure.combinations()}
    assert re.fullmatch("[0-9a-f]{10}", data["commit"]) and data["command"] in html
    for state in data["states"].values():
        for _, blocks, _ in state["rows"]:
            assert sum(length for length, *_ in blocks) <= 1.0001 * state["length"] + 1e-3
        shown = {kind for _, blocks, _ in state["rows"] for _, kind, *_ in blocks if kind >= 0}
        assert len({data["kinds"][kind]["colour"] for kind in shown}) == len(shown)
        assert state["said"].endswith((".", ")"))
    assert "{{" not in html and re.findall(r"https?://[^\"' <]*|@import|url\(|src=", html) == [
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/2000/svg",
    ]
    assert len(html.encode()) < 200_000


def test_the_pipelines_count_the_bubbles_of_the_papers() -> None:
    states = data_of("pipelines")["states"]
    for ranks in (2, 4, 8):
        for microbatches in (4, 8, 16):
            bubble = (ranks - 1) / (microbatches + ranks - 1)
            for schedule in ("gpipe", "1f1b"):
                said = states[f"{schedule}/{ranks}/{microbatches}"]["said"]
                assert f"bubble is {bubble:.1%} " in said


def test_labels_can_be_read_on_their_colours() -> None:
    def luminance(colour: str) -> float:
        shares = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
        linear = [
            share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4
            for share in shares
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    looks = [(kind["colour"], kind["ink"]) for name in NAMES for kind in data_of(name)["kinds"]]
    for colour, ink in [*PALETTE, *looks]:
        light, dark = sorted((luminance(colour), luminance(ink)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_an_unknown_figure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(file.stat().st_mtime_ns for file in DATA.iterdir())
    assert main(["zeros"]) == 2
    assert "there is no figure zeros: there are pipelines, zero" in capsys.readouterr().out
    assert sorted(file.stat().st_mtime_ns for file in DATA.iterdir()) == before
