"""`--order`: which axis lies on which link, for real runs."""

from dataclasses import replace

import pytest

import minidist
from minidist.cli.train import train
from minidist.full.comm.threads_wire.cluster import Cluster

TINY = [
    "--layers=2",
    "--hidden=16",
    "--heads=2",
    "--sequence=16",
    "--batch=8",
    "--steps=2",
    "--dp=2",
]


def on_two_nodes(words: str) -> int:
    """Train on four ranks, two on a node."""
    cluster = replace(Cluster.h100(nodes=2), ranks_per_node=2)
    return max(minidist.run(lambda comm: train([*TINY, *words.split()], comm), 4, cluster=cluster))


@pytest.mark.parametrize(
    ("words", "leaves"),
    (
        ("--tp 2", "along dp leave the nodes"),
        ("--pp 2", "along dp leave the nodes"),
        ("--pp 2 --order pp,dp,tp", "along pp leave the nodes"),
    ),
)
def test_a_run_says_which_axis_leaves_the_nodes(
    words: str, leaves: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_two_nodes(f"{words} --verify") == 0
    assert f"; messages {leaves}" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "message"),
    (
        (
            "--tp 2 --order tp,dp,pp",
            "--order tp,dp,pp,cp spreads the 2 ranks of tp, which talk several times a layer",
        ),
        ("--tp 2 --order dp,pp", "--order dp,pp,cp must name dp, pp, cp and tp once each"),
        ("--pp 2 --order dp,ep,pp", "--order dp,ep,pp,cp,tp must name dp, pp, cp and tp once each"),
    ),
)
def test_an_order_that_cannot_be_meant_is_refused(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_two_nodes(words) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
