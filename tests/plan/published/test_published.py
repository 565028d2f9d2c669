"""The planner's proof: published rows are predicted, and the script that fits constants to them does so.

`rows.json` has the rows; `proof.py` is the script.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from proof import explain, halves, main, range_of_rows, ranges, unfitted

from minidist.plan.device import Constants, table
from minidist.plan.published.check import Compared, check, compare
from minidist.plan.published.fields import PublishedRow
from minidist.plan.published.report import text
from minidist.plan.published.rows import setup
from minidist.plan.trust import kinds
from minidist.plan.trust.kinds import Range, range_of

PATH = Path(__file__).with_name("rows.json")
ROWS: list[PublishedRow] = json.loads(PATH.read_text(encoding="utf-8"))
KNOWN = Constants.table()
TIMED = [row for row in ROWS if row["kind"] == "throughput" and "step_time_s" in row["measured"]]


def of_source(source: str, taken: float) -> Compared:
    return Compared("a row", source, "time", 1.0, taken)


def test_published_runs_are_predicted_and_shuffled_ones_are_not() -> None:
    report = check(ROWS, KNOWN)
    assert not report["left_out"]
    bounds = {entry["name"]: entry.get("bound", 20) for entry in table("sources")["source"]} | {
        "memory": 5,
        "formula": 0,
    }
    assert {
        name: each["mean"]
        for name, each in report["sources"].items()
        if each["mean"] > bounds[name]
    } == {}
    apart = check(ROWS, KNOWN, permuted=1, exact=False)["sources"]
    times = [each["mean"] for name, each in apart.items() if name not in ("formula", "memory")]
    assert sum(times) / len(times) > 100


def test_no_name_and_no_source_is_looked_up() -> None:
    """Predictions stay what they are when every id, note and source is another one."""
    other = [
        {**row, "id": f"row {i}", "source": "nobody", "note": ""} for i, row in enumerate(ROWS)
    ]
    found = [[each["predicted"] for each in check(rows, KNOWN)["rows"]] for rows in (ROWS, other)]
    assert found[0] == found[1]


def test_a_group_is_compared_with_what_its_authors_predicted() -> None:
    """A peer that is a tenth too slow stands beside ours on the same rows, and on no others."""
    rows = [{**row, "group": "ours"} for row in TIMED[:4]]
    for row in rows[:2]:
        row["peer"] = {"ms": 1100 * row["measured"]["step_time_s"]}
    group = check(rows, KNOWN)["groups"]["ours"]
    own = [abs(each.error) for row in rows[:2] for each in compare(row, KNOWN)]
    assert group["n"] == 4 and group["peers"] == 2
    assert group["peer"] == pytest.approx(10) and group["beside_peer"] == pytest.approx(
        sum(own) / 2
    )
    assert group["permuted"] > 5 * group["mean"]
    assert check(TIMED[:4], KNOWN)["groups"] == {}
    assert "10.00 %" in text(check(rows, KNOWN))
    spoiled = check([{**rows[0], "peer": {"ms": "fast"}}, {**rows[1], "peer": 7}], KNOWN)
    assert len(spoiled["left_out"]) == 2


def test_a_rate_of_the_authors_is_a_time() -> None:
    row = TIMED[0]
    run = setup(row, KNOWN)
    rate = run.batch * run.sequence / run.machine.gpus / row["measured"]["step_time_s"]
    found = compare({**row, "peer": {"tok": rate}}, KNOWN)
    assert found[0].peer == pytest.approx(found[0].measured)


def test_the_share_of_models_whose_layout_is_chosen_well_is_told() -> None:
    """Six layouts of one model, measured in the order in which they are predicted, and then in the
    opposite one.
    """
    base = TIMED[0]
    layouts = [{"tp": tp, "dp": base["config"]["gpus"] // tp} for tp in (1, 2, 4, 8)]
    rows = []
    for place, layout in enumerate(layouts):
        config = {**base["config"], **layout, "pp": 1, "micro_batch": 1}
        rows.append({**base, "id": f"layout {place}", "config": config})
    predicted = [compare(row, KNOWN)[0].predicted for row in rows]
    for sign in (1, -1):
        for row, seconds in zip(rows, predicted, strict=True):
            row["measured"] = {"step_time_s": seconds**sign}
            row["derived"] = {}
        (model,) = check(rows, KNOWN)["ranking"]
        assert (model["chosen_id"] == model["best_id"]) == (sign == 1)
        pairs = [(row, each) for row in rows for each in compare(row, KNOWN)]
        assert ranges(pairs, "")["ranking"]["chosen well"] == (sign == 1)


# ---------------------------------------------------------------- the script


def slower(row: PublishedRow, factor: float) -> PublishedRow:
    """Return a row that took so many times the prediction."""
    taken = factor * compare(row, KNOWN)[0].predicted
    return {**row, "measured": {"step_time_s": taken}, "derived": {}}


def test_the_terms_of_a_row_explain_what_was_measured() -> None:
    found = explain(slower(TIMED[0], 1.3), KNOWN)["time"]
    total = sum(value for value, _ in found["terms"].values())
    assert total == pytest.approx(found["predicted"])
    for value, factor in found["terms"].values():
        assert total + (factor - 1) * value == pytest.approx(found["measured"])
    fast = explain(slower(TIMED[0], 0.5), KNOWN)["time"]["terms"]
    assert fast["computing"][1] > 0 and fast["other"][1] is None, "8 ms are no half of the step"


def test_a_constant_that_explains_a_row_does_so() -> None:
    slow = slower(TIMED[0], 1.1)
    levers = explain(slow, KNOWN)["time"]["constants"]
    found = {name: value for name, value in levers.items() if value and ":" not in name}
    assert 0 < len(found) < len(levers)
    for name, value in found.items():
        assert compare(slow, KNOWN.but(**{name: value}))[0].error == pytest.approx(0, abs=0.5)


def test_a_row_is_explained_by_its_id(capsys: pytest.CaptureFixture[str]) -> None:
    main(["explain", str(TIMED[0]["id"]), str(PATH)])
    assert "computing" in json.loads(capsys.readouterr().out)["time"]["terms"]


def test_halves_share_no_row_and_a_fit_begins_without_one() -> None:
    one, other = halves(ROWS)
    ids = [{row["id"] for row in part} for part in (one, other)]
    assert not ids[0] & ids[1] and ids[0] | ids[1] == {row["id"] for row in ROWS}
    assert abs(len(one) - len(other)) <= 1
    begun = unfitted()
    assert begun["host"] == pytest.approx((2e-4 * 2e-3) ** 0.5) and begun["launch"] == 4e-6


# ---------------------------------------------------------------- ranges


def test_four_of_five_rows_lie_inside_and_a_large_source_does_not_drown_the_others() -> None:
    even = [of_source("one", 1 + place / 100) for place in range(100)]
    found = range_of_rows(even)
    assert found.low == pytest.approx(1.09, abs=0.011)
    assert found.high == pytest.approx(1.89, abs=0.011)
    assert range_of_rows(even[:4]).low == 0.0, "four rows are too few for a range"
    many = [of_source("many", 1.0)] * 900
    assert range_of_rows([*many, *[of_source("few", 1.5)] * 36]).high == 1.5
    assert range_of_rows([*many, *[of_source("many", 1.5)] * 36]).high == 1.0


def test_tested_rows_lie_inside_the_ranges_that_are_stored() -> None:
    """Four of five do of all rows. Where many of these do not, predictions have changed since:
    `proof.py ranges` writes the ranges anew.
    """
    inside = []
    for row in ROWS:
        for each in compare(row, KNOWN, exact=False):
            found = (
                range_of(setup(row, KNOWN), each.quantity) if each.quantity != "formula" else None
            )
            if found and found.low:
                low, high = found.low * each.predicted, found.high * each.predicted
                inside.append(low <= each.measured <= high)
    assert len(inside) > 20 and sum(inside) >= 0.6 * len(inside)


def test_the_stored_table_is_what_the_command_makes_of_rows() -> None:
    pairs = [(row, each) for row in ROWS for each in compare(row, KNOWN)]
    made, kept = ranges(pairs, "of the table"), kinds.errors()
    assert made.keys() == kept.keys() and made["kinds"].keys() <= kept["kinds"].keys()
    for quantities in [*made["kinds"].values(), *kept["kinds"].values()]:
        assert quantities.keys() <= {"time", "memory", "memory reserved"}
        for each in quantities.values():
            found = Range(**each)
            assert (found.low <= found.high) and (found.low > 0) == (found.rows >= kinds.LEAST)
    assert sum(each["time"]["rows"] for each in kept["kinds"].values() if "time" in each) > 900
