"""A part of torch's own tests on our ranks, and that the runner sees one that fails. All of them:
`make torch-suite`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from ranks import mpirun

HERE = Path(__file__).parent
TESTS = [
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_coalesced_simple",
    "test_all_gather_v_cuda",  # of unequal sizes, as the next one
    "test_reduce_scatter_v_cuda",
    "test_all_to_all_single_unequal_split_complex",
    "test_batch_isend_irecv_nccl",  # to oneself, too
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_hook_parity_powerSGD",
    "test_different_graph_across_ranks",
    "test_get_future",
    "test_invalid_static_graph",
    "test_new_subgroups_by_enumeration",
    "test_scatter_object_list",
]
REFUSED = "test_sparse_all_reduce_sum"
ON_PROCESSES = ["test_get_rank", "test_isend_torch_profiler", "test_gather_object"]


def test_a_part_of_torch_s_tests_on_simulated_ranks_and_that_a_failure_is_seen() -> None:
    program = f"""if True:
        import run
        print("status", run.main(["--on", "simulated", *{TESTS!r}]))
        early = run.started("test_get_backend", 4)
        run.select.select([early.reading], [], [])  # it has ended, and the next one took long
        print("early", run.ended(early._replace(deadline=0.0)))
        print("refused", run.ended(run.started({REFUSED!r}, 4)))
        """
    outcome = subprocess.run(
        [sys.executable, "-c", program], cwd=HERE, capture_output=True, text=True, timeout=100
    )
    passed = re.findall(r"^passed +(\w+):", outcome.stdout, re.MULTILINE)
    assert sorted(passed) == sorted(TESTS), outcome.stdout + outcome.stderr
    assert "status 0" in outcome.stdout
    assert "early Outcome(status='passed'" in outcome.stdout
    assert re.search(r"refused.*failed.*layout torch.sparse_coo does not travel", outcome.stdout)


def test_some_that_need_processes_under_mpirun(tmp_path: Path) -> None:
    job = mpirun(
        2, HERE / "under_mpi.py", *ON_PROCESSES, env={"TEMP_DIR": str(tmp_path), "WORLD_SIZE": "2"}
    )
    lines = [json.loads(line) for line in job.stdout.splitlines() if line.startswith('["a test"')]
    assert lines == [["a test", name, ""] for name in ON_PROCESSES], job.stderr
