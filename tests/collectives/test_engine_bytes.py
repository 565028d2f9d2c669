"""What an engine's own collectives had to send is counted by formula, apart from messages, and
shown as such.
"""

from __future__ import annotations

import re
from pathlib import Path

from ranks import mpirun, torchrun

COUNTS = """
    import numpy as np
    import minidist
    from minidist.full.collectives import choose, operations

    comm = minidist.init(limit=60)
    P, root = comm.size, 1

    def call(name, n, on, algorithm):
        shard = len(np.array_split(np.zeros(n), P)[comm.rank])
        counts = [len(part) for part in np.array_split(np.zeros(n), P)]
        match name:
            case "all_reduce" | "broadcast" | "reduce":
                getattr(operations, name)(np.ones(n), on, **({} if name == "all_reduce" else {"root": root}),
                                          algorithm=algorithm)
            case "reduce_scatter" | "all_to_all":
                getattr(operations, name)(np.ones(n), on, algorithm=algorithm)
            case "all_gather":
                operations.all_gather(np.ones(shard), on, counts=counts, algorithm=algorithm)
            case "gather":
                operations.gather(np.ones(shard), on, root, counts=counts, algorithm=algorithm)
            case "scatter":
                operations.scatter(np.ones(n) if comm.rank == root else None, on, root, algorithm=algorithm)

    def engine_bytes(*what):
        before, sent = comm.traffic.engine_bytes, (comm.traffic.bytes, comm.traffic.messages)
        call(*what)
        assert (comm.traffic.bytes, comm.traffic.messages) == sent or what[3] != "native"
        return comm.traffic.engine_bytes - before

    group = comm.split(0)
    for name in choose.COLLECTIVES:
        for n in (0, 1, 7, 12):
            at_root = len(np.array_split(np.zeros(n), P)[root])
            special = {"all_reduce": 2 * (P - 1) * n, "gather": n - at_root, "scatter": n - at_root}
            least = 8 * special.get(name, (P - 1) * n)
            mine = engine_bytes(name, n, group, "native")
            assert sum(comm.all_gather_object(mine)) == least, (name, n)
            if n == 12 and name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
                assert mine * P == least, "shared out evenly"
            assert max(comm.all_gather_object(mine)) <= max(n * 8, 2 * (P - 1) * -(-n // P) * 8), (name, n)
        assert engine_bytes(name, 12, comm, choose.algorithms(name)[1]) == 0

    before = comm.traffic.engine_bytes
    unknown = np.uint16 if comm.wire.kind == "torch" else np.float16
    try:
        operations.all_reduce(np.ones(3, unknown), comm, algorithm="native")
        raise SystemExit("the engine took it")
    except TypeError:
        assert comm.traffic.engine_bytes == before, "what the engine refuses is not counted"
"""

REPORTS = """
    import sys
    from minidist.cli.variants.compare import compare
    from minidist.cli.variants.stages import stages
    from minidist.cli.train import train
    from training import TINY

    rule = choose.explain
    choose.explain = lambda *asked: rule(*asked) if asked[-1].wire.kind == "threads" else ("native", "as between GPUs")
    assert train([*TINY, "--steps", "2", "--trace", sys.argv[1]], comm) == 0
    ddp = lambda config, ranks: {"DDP": stages(config, ranks)["DDP"]}
    assert compare([*TINY, "--steps", "2"], comm, ddp, "stages") == 0
"""


def test_the_sum_over_ranks_is_the_least_that_the_operation_has_to_move() -> None:
    job = mpirun(3, COUNTS)
    assert job.returncode == 0, job.stderr


def test_reports_show_it_beside_the_formula_and_say_what_it_is(tmp_path: Path) -> None:
    job = torchrun(2, COUNTS + REPORTS, str(tmp_path / "trace.json"), timeout=100)
    assert job.returncode == 0, job.stderr
    row = re.search(
        r"sent by rank 0 +0 \+ ([\d,]+) by the engine, by formula\n.* x steps +([\d,]+)\n",
        job.stdout,
    )
    assert row is not None, job.stdout
    assert row[1] == row[2] != "0"
    table = re.findall(r"^[01] .*B \+ [\d.]+ KiB by the engine, by formula$", job.stdout, re.M)
    assert len(table) == 2, job.stdout
    assert re.search(r"^DDP .* 0 B \+ [\d.]+ KiB by the engine, by formula ", job.stdout, re.M), (
        job.stdout
    )
