"""The learning rate: its ends, its joints, and no jump in between."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidist.full.trainer.schedule import learning_rate, linear_scaling

PEAK = 3e-4


def test_it_starts_low_reaches_the_peak_and_ends_at_the_final_rate() -> None:
    assert learning_rate(0, PEAK, warmup=10, total=100) == pytest.approx(PEAK / 10)
    assert learning_rate(9, PEAK, warmup=10, total=100) == PEAK
    # halfway down
    assert learning_rate(54, PEAK, warmup=10, total=100) == pytest.approx(PEAK * 0.55)
    assert learning_rate(99, PEAK, warmup=10, total=100) == pytest.approx(PEAK * 0.1)
    assert learning_rate(10_000, PEAK, warmup=10, total=100) == pytest.approx(PEAK * 0.1)
    assert learning_rate(99, PEAK, warmup=10, total=100, final_fraction=0) == 0


@settings(deadline=None)  # where cores are shared, time says nothing
@given(warmup=st.integers(0, 50), more=st.integers(0, 100), fraction=st.floats(0, 1))
def test_it_rises_then_falls_and_never_jumps(warmup: int, more: int, fraction: float) -> None:
    total = warmup + more
    rates = [learning_rate(step, PEAK, warmup, total, fraction) for step in range(total + 2)]
    assert all(PEAK * fraction * (1 - 1e-12) <= rate <= PEAK for rate in rates[warmup:])
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    if more:  # without room for the cosine, the rate has to drop at once
        # the steepest a straight line and a cosine get
        slope = max(1 / max(warmup, 1), math.pi / 2 / more)
        steps = [abs(after - before) for before, after in pairwise(rates)]
        assert max(steps) <= PEAK * slope * (1 + 1e-9)


def test_without_warm_up_it_starts_at_the_top() -> None:
    assert learning_rate(0, PEAK, warmup=0, total=1000) == pytest.approx(PEAK, rel=1e-5)


def test_a_run_that_is_all_warm_up_ends_at_the_peak() -> None:
    assert learning_rate(9, PEAK, warmup=10, total=10) == PEAK


def test_other_shapes_fall_along_a_straight_line_or_late_or_not_at_all() -> None:
    def rates(shape: str, cooldown: int = 0) -> list[float]:
        return [learning_rate(step, 1.0, 2, 10, 0.2, shape, cooldown) for step in range(11)]

    assert rates("linear") == pytest.approx([0.5, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2])
    assert rates("wsd", 4) == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert rates("constant") == [0.5, *[1] * 10]
    assert rates("wsd", 8) == pytest.approx(rates("linear"))
    with pytest.raises(ValueError, match="cooldown = 9 does not fit into the 8 steps"):
        rates("wsd", 9)
    with pytest.raises(ValueError, match="shape = 'step' is unknown: choose one of cosine, linear"):
        rates("step")


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="warmup = 20 steps do not fit into total = 10"):
        learning_rate(0, PEAK, warmup=20, total=10)
    with pytest.raises(ValueError, match="step = -1"):
        learning_rate(-1, PEAK, warmup=1, total=10)
    with pytest.raises(ValueError, match="final_fraction = 2"):
        learning_rate(1, PEAK, warmup=1, total=10, final_fraction=2)
    with pytest.raises(ValueError, match="base_batch = 0"):
        linear_scaling(0.1, 0, 8)


def test_the_rate_follows_the_batch() -> None:
    assert linear_scaling(0.1, 256, 8192) == pytest.approx(3.2)
    assert linear_scaling(0.1, 256, 256) == 0.1
    assert linear_scaling(0.1, 256, 64) == pytest.approx(0.025)
