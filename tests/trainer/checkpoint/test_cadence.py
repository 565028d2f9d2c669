"""How often to save: Young's and Daly's estimates against Daly's own model, minimised by trying."""

from __future__ import annotations

import math
import random

import pytest

from minidist.full.checkpoint.cadence import advice, daly, shares, young


def run_time(tau: float, delta: float, mtbf: float, restart: float) -> float:
    """Expected seconds for each second of computing (Daly 2006, the exact model)."""
    return mtbf * math.exp(restart / mtbf) * math.expm1((tau + delta) / mtbf) / tau


def best(delta: float, mtbf: float, restart: float = 0.0) -> float:
    """Find the interval with the least expected time by narrowing down; the curve has one
    minimum.
    """
    low, high = 1e-9 * mtbf, 5 * mtbf
    for _ in range(300):
        third = (high - low) / 3
        if run_time(low + third, delta, mtbf, restart) < run_time(
            high - third, delta, mtbf, restart
        ):
            high -= third
        else:
            low += third
    return low


@pytest.mark.parametrize("ratio", [1e-6, 1e-4, 1e-3, 0.01, 0.05, 0.2, 0.5, 1.0])
def test_dalys_estimate_is_the_minimum(ratio: float) -> None:
    mtbf = 36000.0
    tau = daly(ratio * mtbf, mtbf)
    assert tau == pytest.approx(best(ratio * mtbf, mtbf), rel=0.002 if ratio < 0.1 else 0.02)
    assert run_time(tau, ratio * mtbf, mtbf, 0) <= 1.0002 * run_time(
        best(ratio * mtbf, mtbf), ratio * mtbf, mtbf, 0
    )


def test_restarting_does_not_move_the_minimum() -> None:
    assert best(60, 36000, restart=600) == pytest.approx(best(60, 36000), rel=1e-4)


def test_youngs_estimate_is_dalys_to_first_order() -> None:
    assert young(50, 10000) == 1000
    assert young(1e-4, 1e4) == pytest.approx(daly(1e-4, 1e4), rel=1e-3)
    # it forgets that writing takes time in which to fail
    assert young(3000, 10000) > 1.2 * daly(3000, 10000)


def test_writing_takes_longer_than_two_failures_are_apart() -> None:
    assert daly(200, 100) == daly(1000, 100) == 100
    assert daly(199.999, 100) == pytest.approx(200 * (1 + 1 / 3 + 1 / 9) - 200, rel=1e-3)


def test_shares_add_up_and_are_those_of_a_simulated_run() -> None:
    tau, delta, mtbf, restart = 300.0, 40.0, 1500.0, 25.0
    draw = random.Random(1)
    kept, elapsed, intervals = 0, 0.0, 40_000
    while kept < intervals:  # failures have no memory: each attempt may draw anew
        failure = draw.expovariate(1 / mtbf)
        if failure > tau + delta:
            kept, elapsed = kept + 1, elapsed + tau + delta
            continue
        elapsed += failure
        while (failure := draw.expovariate(1 / mtbf)) < restart:
            elapsed += failure  # while restarting
        elapsed += restart
    found = shares(tau, delta, mtbf, restart)
    assert sum(found) == pytest.approx(1) and found.training == pytest.approx(
        1 / run_time(tau, delta, mtbf, restart)
    )
    assert found.training == pytest.approx(kept * tau / elapsed, rel=0.01)
    assert found.writing == pytest.approx(kept * delta / elapsed, rel=0.01)
    assert found.lost == pytest.approx(1 - kept * (tau + delta) / elapsed, rel=0.03)


def test_nothing_is_ever_finished_if_failures_come_too_fast() -> None:
    assert shares(1e6, 1.0, 1.0).training == 0 and shares(1e6, 1.0, 1.0).lost == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            (30, 2.0, 24.0),
            "save every 1128 steps (37.6 min): with a failure every 24 h on average, 1.3% of the "
            "time then goes into writing and 1.3% is lost by failures",
        ),
        (
            (30, 20.0, 5.0),
            "save every 51 steps (17 min): with a failure every 5 h on average, 2.8% of the time "
            "then goes into writing and 2.9% is lost by failures",
        ),
        (
            (0, 100.0, 1.0),
            "save every 1 step (100 s): with a failure every 60 min on average, 0.0% of the time "
            "then goes into writing and 1.4% is lost by failures",
        ),
    ],
)
def test_the_advice(arguments: tuple[float, ...], words: str) -> None:
    assert advice(*arguments) == words  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [(-1, 1, 1), (1, 1, 0), (math.nan, 1, 1)])
def test_what_is_no_time_is_refused(arguments: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="writing takes"):
        advice(*arguments)  # type: ignore[arg-type]
