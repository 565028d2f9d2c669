"""One program, on ranks of every kind: the same numbers, and the same bytes wherever we carry them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from c10d_same_program import STRATEGIES, Found, everything
from ranks import mpirun, torchrun

import minidist
from minidist.full.comm import Communicator

RANKS = 2
PROGRAM = Path(__file__).parent / "c10d_same_program.py"


def on_threads(folder: Path, **engine: Any) -> list[Found]:
    def program(comm: Communicator) -> Found:
        dist.init_process_group("minidist")
        return everything(lambda: comm.traffic.bytes)

    return minidist.run(program, RANKS, torch=True, **engine)


def in_processes(launch: Any, backend: str, folder: Path) -> list[Found]:
    outcome = launch(RANKS, PROGRAM, str(folder), backend)
    assert outcome.returncode == 0, outcome.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def under_mpirun(folder: Path) -> list[Found]:
    return in_processes(mpirun, "minidist", folder)


def on_gloo(folder: Path) -> list[Found]:
    return in_processes(torchrun, "gloo", folder)


def in_turns(folder: Path) -> list[Found]:
    return on_threads(folder, engine="cooperative", seed=7)


@pytest.mark.parametrize("others", [in_turns, under_mpirun, on_gloo])
def test_one_program_gives_the_same_numbers_and_bytes_on_every_engine(
    others: Any, tmp_path: Path
) -> None:
    """Of two ranks' numbers the sum is the same to the last bit, whoever adds."""
    found, other = on_threads(tmp_path), others(tmp_path)
    for here, there in zip(found, other, strict=True):
        for name in (strategy.__name__ for strategy in STRATEGIES):
            (numbers, sent), (others_numbers, others_sent) = here[name], there[name]
            assert all(map(torch.equal, numbers, others_numbers)), name
            assert sent > 0
            if others is not on_gloo:
                assert sent == others_sent, name
