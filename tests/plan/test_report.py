"""`plan check` by group and beside peers, `plan explain`, and constants of half of the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minidist.cli.plan.command import main
from minidist.plan.device import Constants
from minidist.plan.published.check import check, compare
from minidist.plan.published.explain import explain
from minidist.plan.published.fields import PublishedRow
from minidist.plan.published.halves import halves, unfitted
from minidist.plan.published.report import text
from minidist.plan.published.rows import setup

ROWS: list[PublishedRow] = json.loads(
    (Path(__file__).parents[2] / "minidist/plan/published/tested_rows.json").read_text(
        encoding="utf-8"
    )
)
KNOWN = Constants.table()
TIMED = [row for row in ROWS if row["kind"] == "throughput" and "step_time_s" in row["measured"]]


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
    for sign, share in ((1, "100.0%"), (-1, "0.0%")):
        for row, seconds in zip(rows, predicted, strict=True):
            row["measured"] = {"step_time_s": seconds**sign}
            row["derived"] = {}
        report = check(rows, KNOWN)
        (model,) = report["ranking"]
        assert (model["chosen_id"] == model["best_id"]) == (sign == 1)
        said = text(report)
        assert f"in {share} of all 1 models" in said
        assert ("  not " in said) == (sign == -1)


# ---------------------------------------------------------------- explained


def test_the_terms_of_a_row_explain_what_was_measured() -> None:
    row = TIMED[0]
    slow = {**row, "measured": {"step_time_s": 1.3 * compare(row, KNOWN)[0].predicted}}
    found = explain({**slow, "derived": {}}, KNOWN)[0]
    total = sum(term.predicted for term in found.terms)
    assert total == pytest.approx(found.compared.predicted)
    for term in found.terms:
        if term.factor:
            longer = total + (term.factor - 1) * term.predicted
            assert longer == pytest.approx(found.compared.measured)
    fast = {**row, "measured": {"step_time_s": 0.5 * found.compared.predicted}, "derived": {}}
    by_name = {term.name: term.factor for term in explain(fast, KNOWN)[0].terms}
    assert by_name["computing"] > 0 == by_name["other"], "8 ms are no half of the step"


def test_a_constant_that_explains_a_row_does_so() -> None:
    row = TIMED[0]
    slow = {**row, "measured": {"step_time_s": 1.1 * compare(row, KNOWN)[0].predicted}}
    slow["derived"] = {}
    levers = explain(slow, KNOWN)[0].levers
    found = [lever for lever in levers if lever.explains is not None and ":" not in lever.name]
    assert found and any(lever.explains is None for lever in levers)
    for lever in found:
        other = KNOWN.but(**{lever.name: lever.explains or 0.0})
        assert compare(slow, other)[0].error == pytest.approx(0, abs=0.5)


def test_a_row_is_explained_by_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, row = tmp_path / "rows.json", TIMED[0]
    path.write_text(json.dumps(ROWS))

    def said(id: str, *words: str) -> Any:
        status = main(["explain", id, "--rows", str(path), *words])
        return status, capsys.readouterr()

    status, found = said(str(row["id"]))
    assert status == 0 and all(
        word in found.out for word in ("computing", "measured", "cannot alone", "constant")
    )
    status, found = said(str(row["id"]), "--format", "json")
    assert json.loads(found.out)[0]["id"] == row["id"]
    status, found = said(f"{row['id']}x")
    assert status == 2 and f"did you mean {row['id']}?" in found.err


# ---------------------------------------------------------------- halves


def test_halves_share_no_row_and_a_fit_begins_without_one() -> None:
    one, other = halves(ROWS)
    ids = [{row["id"] for row in part} for part in (one, other)]
    assert not ids[0] & ids[1] and ids[0] | ids[1] == {row["id"] for row in ROWS}
    assert abs(len(one) - len(other)) <= 1
    begun = unfitted()
    assert begun["host"] == pytest.approx((2e-4 * 2e-3) ** 0.5) and begun["launch"] == 4e-6
