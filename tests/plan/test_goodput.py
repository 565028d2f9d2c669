"""What failures leave of the time: by simulation, in closed form, and as large runs have reported."""

from __future__ import annotations

import json
from dataclasses import astuple, replace

import pytest

from minidist.cli.plan import command
from minidist.plan.device import table
from minidist.plan.failures.policies import POLICIES, Job, closed_form
from minidist.plan.failures.simulate import simulate

JOB = Job(3600.0, step=10.0, write=5.0, restart=120.0, stall=30.0, repair=300.0, replicas=16)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mtbf", [900.0, 3600.0, 36_000.0])
def test_the_simulation_is_the_closed_form_where_there_is_one(policy: str, mtbf: float) -> None:
    job = replace(JOB, mtbf=mtbf)
    found = simulate(job, policy)
    assert sum(astuple(found)) == pytest.approx(1)
    assert found.training == pytest.approx(closed_form(job, policy), abs=0.01)


@pytest.mark.parametrize("replicas", [1, 2])
def test_no_more_replicas_are_missed_than_there_are(replicas: int) -> None:
    """With a repair as long as the time between failures, one replica is there for a third of it."""
    job = replace(JOB, mtbf=36_000.0, repair=36_000.0, replicas=replicas)
    found = simulate(job, "quorum").training
    assert found == pytest.approx(closed_form(job, "quorum"), abs=0.01)


def test_each_policy_pays_for_something_else() -> None:
    found = {policy: simulate(JOB, policy) for policy in POLICIES}
    assert found["restart"].stopped > found["spare"].stopped > found["quorum"].stopped
    assert found["quorum"].stopped > found["replace"].stopped
    assert found["quorum"].missing > 0 == found["replace"].missing
    assert found["spare"].redone > 10 * found["replace"].redone, "half an interval; half a step"


def test_spares_run_out() -> None:
    """Each machine is away ten times as long as failures are apart."""
    job = replace(JOB, repair=36_000.0)
    always, some = (simulate(replace(job, spares=count), "spare") for count in (1e9, 12.0))
    none = simulate(replace(job, spares=2.0), "spare")
    assert always.training > some.training + 0.02 > none.training + 0.3


def test_a_job_that_hardly_ever_comes_back_ends_all_the_same() -> None:
    hopeless = Job(600.0, step=10.0, write=10.0, restart=600.0, repair=14_400.0)
    found = simulate(hopeless, "restart", failures=500)
    assert found.training < 0.01 and found.stopped > 0.98
    assert closed_form(hopeless, "restart") < 1e-9


def test_the_same_seed_gives_the_same_answer() -> None:
    assert simulate(JOB, "quorum", seed=3) == simulate(JOB, "quorum", seed=3)
    assert simulate(JOB, "quorum", seed=3) != simulate(JOB, "quorum", seed=4)


def test_what_large_runs_have_reported() -> None:
    found = {
        name: simulate(Job(**each["job"]), each["policy"]).training
        for name, each in table("reported").items()
    }
    assert found["Llama 3 405B, 54 days"] > 0.9
    assert found["BLOOM"] > 0.9
    slow, *pooled = (found[f"OPT-175B, until {day}"] for day in ("3 December", "16 December"))
    assert slow < 0.6 < pooled[0], "a pool of spares is what helped"
    assert found["100,000 GPUs, all restart"] == pytest.approx(0.44, abs=0.01)
    assert found["the same, FT-HSDP"] == pytest.approx(0.80, abs=0.05)


def test_the_failure_rate_that_44_percent_imply_is_near_that_of_llama_3() -> None:
    per_gpu = 16_384 * 54 * 86_400 / 419
    job = Job(**table("reported")["100,000 GPUs, all restart"]["job"])
    assert closed_form(job, "spare") == pytest.approx(0.44, abs=1e-9)
    assert 1 < per_gpu / 100_000 / job.mtbf < 3


def test_published_failures_take_no_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["goodput", "--mtbf", "5"])
    said = capsys.readouterr()
    assert not said.out and "there is no option --mtbf" in said.err


def test_the_planner_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "llama-8b", "--cluster", "h100:64", "--tokens", "100B", "--top", "1"]
    assert command.main([*words, "--mtbf", "2", "--policy", "replace", "--format", "json"]) == 0
    best = json.loads(capsys.readouterr().out)["layouts"][0]
    assert set(best["goodput"]) == set(POLICIES)
    share = best["goodput"]["replace"]["closed_form"]
    assert best["cost"]["days"] == pytest.approx(best["cost"]["undisturbed"] / share)
    assert command.main([*words, "--policy", "quorum"]) == 0
    assert "share of the time" in (said := capsys.readouterr().out) and "(assumed: see" in said
    assert command.main(words) == 0
    assert "share of the time" not in capsys.readouterr().out
    assert command.main([*words, "--repair", "-1"]) == 2
    assert "--repair -1" in capsys.readouterr().err
    assert command.main(["goodput"]) == 0
    said = capsys.readouterr().out
    for name, each in table("reported").items():
        assert f"{name}: assumed {each['assumed']}" in said


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ("dp=1", "a peer that holds the same: this layout has one replica, and so nobody does"),
        ("zero=1", "a peer that holds the same: zero=1 keeps the optimizer's shards once"),
    ],
)
def test_who_has_no_peer_is_told_so(
    fixed: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", "llama-8b", "--cluster", "h100:8", "--mtbf", "50", "--fixed", "tp=2"]
    assert command.main([*words, "--batch", "256K", "--top", "1", "--fixed", fixed]) == 0
    assert said in capsys.readouterr().out
