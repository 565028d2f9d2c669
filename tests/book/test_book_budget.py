"""The budget is what the papers say; what a step sends is counted in `test_book_train.py`."""

from dataclasses import replace
from itertools import pairwise

import pytest

from minidist.budget import Layout, bill, bytes_held, parameters, step_seconds
from minidist.model import GPT, GPTConfig
from minidist.pipeline import bubble, in_flight, one_f_one_b

LLAMA = GPTConfig(
    vocabulary=128256,
    layers=80,
    hidden=8192,
    heads=64,
    key_value_heads=8,
    intermediate=28672,
    sequence=4096,
)
SBH = 4096 * 8192
TEAM = Layout(dp=8, pp=2, tp=4, batch=1024, microbatches=128)
LINKS = {"rate": 500e12, "inside": 365e9, "across": 50e9}


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_the_model(tied: bool) -> None:
    config = GPTConfig(vocabulary=31, layers=3, hidden=16, heads=4, key_value_heads=2, tied=tied)
    assert parameters(config) == sum(each.numel() for each in GPT(config, 0).parameters())


def test_activations_are_those_of_korthikanti() -> None:
    """Ten of 34 stay whole without sequence parallelism; with it nothing does."""

    def activations(t: int, sp: bool) -> float:
        layout = Layout(tp=t, sp=sp, batch=8, microbatches=8)
        return bytes_held(LLAMA, layout)["activations"] / (80 * SBH)

    assert [activations(t, False) for t in (1, 2, 4, 8)] == [34, 22, 16, 13]
    assert [activations(t, True) for t in (1, 2, 4, 8)] == [34, 17, 8.5, 4.25]


def test_states_are_16_bytes_that_zero_divides_once() -> None:
    on_a_gpu = parameters(LLAMA) / 8
    for zero, wanted in enumerate([(2, 2, 12), (2, 2, 1.5), (2, 0.25, 1.5), (0.25, 0.25, 1.5)]):
        held = bytes_held(LLAMA, replace(TEAM, zero=zero))
        found = [held[name] / on_a_gpu for name in ("parameters", "gradients", "optimizer")]
        assert found == pytest.approx(wanted)


def test_more_stages_hold_no_fewer_activations() -> None:
    """The first of p stages has 1/p of the layers, and p microbatches in flight."""
    whole = [bytes_held(LLAMA, replace(TEAM, pp=p))["activations"] for p in (1, 2, 4, 8)]
    assert whole == [80 * 16 * SBH] * 4
    again = replace(TEAM, pp=8, sp=True, recompute=True)  # keeps 2/t of 34, and one layer
    assert bytes_held(LLAMA, again)["activations"] == (80 * 2 / 4 + 32 / 4) * SBH


@pytest.mark.parametrize("p", (1, 2, 4))
@pytest.mark.parametrize("turns", (1, 4))
def test_the_bubble_is_that_of_the_schedule(p: int, turns: int) -> None:
    m = turns * p
    layout = Layout(pp=p, batch=m, microbatches=m)
    seconds, schedule = step_seconds(LLAMA, layout, **LINKS), one_f_one_b(p, m)
    share = bubble(schedule)
    assert seconds["bubble"] == pytest.approx(seconds["computing"] * share / (1 - share))
    assert in_flight(schedule)[0] == min(p, m)


def test_a_step_by_hand() -> None:
    layout = replace(TEAM, recompute=True)
    seconds = step_seconds(LLAMA, layout, 1e15, inside=1e12, across=1e8)
    operations = 4096 * (6 * parameters(LLAMA) + 12 * 80 * 4096 * 8192)
    one = operations / 8 / 1e15
    # Six all-reduces in each of 40 layers, half of 2 for embedding and head; the loss is little.
    tensor = 128 * (6 * 40 + 1) * 1.5 * 2 * SBH / 1e12
    assert seconds["computing"] == pytest.approx(128 * one)
    assert seconds["recomputing"] == pytest.approx(128 * one / 3)
    assert seconds["tensor"] == pytest.approx(tensor, rel=1e-3)
    assert seconds["bubble"] == pytest.approx((128 * one * 4 / 3 + tensor) / 128, rel=1e-3)
    reducing = 7 / 4 * 2 * parameters(LLAMA) / 8 / 1e8
    assert seconds["data"] == pytest.approx(reducing - one, rel=1e-3)


def test_each_part_is_alone_and_what_hides_costs_nothing() -> None:
    one = step_seconds(LLAMA, Layout(batch=64, microbatches=64), **LINKS)
    assert {name for name, seconds in one.items() if seconds} == {"computing"}
    data = [step_seconds(LLAMA, TEAM, 5e14, 1e12, across)["data"] for across in (1e15, 5e9, 1e9)]
    assert data[0] == 0 and all(few < many for few, many in pairwise(data))


def test_llama_took_the_days_that_were_reported() -> None:
    """380 tokens a second on each of 2,048 A100: 1.4T tokens take about 21 days (Touvron et al.
    2023, section 2.4).
    """
    days, money = bill(4e6 / (380 * 2048), 1.4e12, 4e6, 2048, 1.5)
    assert 20.5 < days < 21.5
    assert money == pytest.approx(days * 24 * 2048 * 1.5)
    assert bill(1.0, 10, 4, 1, 1.0)[0] == 3 / 86400, "the last step counts in full"
