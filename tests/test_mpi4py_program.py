"""docs/mpi4py-program.md is true: the page's assignment runs on the page's stand-in for mpi4py."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidist import DeadlockError, run

PAGE = Path(__file__).parents[1] / "docs" / "mpi4py-program.md"
BLOCKS = dict(re.findall(r"^```python\n# (.*?)\n(.*?)^```$", PAGE.read_text(), re.M | re.S))


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names of the page's own side, in a folder that has the assignment."""
    monkeypatch.setitem(sys.modules, "mpi4py", sys.modules.get("mpi4py"))  # put back afterwards
    monkeypatch.chdir(tmp_path)
    Path("assignment.py").write_text("# assignment.py\n" + BLOCKS["assignment.py"])
    names: dict[str, Any] = {}
    exec(BLOCKS["simulated_mpi.py"], names)
    return names


def test_each_rank_has_names_of_its_own(stand_in: dict[str, Any]) -> None:
    exec(BLOCKS["on four ranks"].rpartition("\nminidist.run")[0], stand_in)
    mean = sum(np.random.default_rng(rank).standard_normal(3) for rank in range(4)) / 4
    for rank, (came, found) in enumerate(run(stand_in["main"], 4)):
        assert came == (rank - 1) % 4
        np.testing.assert_allclose(found, mean, rtol=1e-14)


def test_its_calls_do_what_mpi4pys_do(stand_in: dict[str, Any]) -> None:
    def program(comm: Any) -> None:
        mpi = stand_in["Comm"](comm)
        rank, size = mpi.Get_rank(), mpi.Get_size()
        mine, all_of_them = np.full((2, 3), float(rank)), np.empty((size, 2, 3))
        mpi.Allgather(mine, all_of_them)
        assert (all_of_them == np.arange(size)[:, None, None]).all()
        leaving, arriving = rank * 10.0 + np.arange(size), np.empty(size)
        mpi.Alltoall(leaving, arriving)
        assert (arriving == 10.0 * np.arange(size) + rank).all()
        half = mpi.Split(rank % 2, rank)
        assert half.allgather(rank) == list(range(rank % 2, size, 2))
        if rank < 2:
            ends = (mpi.Send, 1) if rank == 0 else (mpi.Recv, 0)
            ends[0](mine, ends[1])
            assert (mine == 0).all()
        mpi.Barrier()

    run(program, 4)


def test_a_message_that_nobody_sends_is_told_with_its_call(stand_in: dict[str, Any]) -> None:
    def program(comm: Any) -> None:
        names = stand_in["names_of"]("assignment.py", comm)
        if comm.rank == 0:
            names["pass_on"]()

    with pytest.raises(DeadlockError, match=r"rank 0 waits: receive from rank 1 .* in Sendrecv"):
        run(program, 2)
