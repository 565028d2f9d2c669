"""torch's own tests of `torch.distributed`, from the installed wheel, on the ranks of this package.

    torch/testing/_internal/distributed/distributed_test.py      for four processes, and gloo
      └▶ OnProcesses("test_broadcast") on each rank, with init_process_group("minidist")

That file asks for its backend by a variable, and marks what the backend cannot do. It is told
`gloo` when it is imported, and `minidist` when a test runs. Its marks skip nothing here: what only
MPI or NCCL can, or what torch leaves out on its own machines, is asked of us as well, and a test
that is marked for GPUs finds the CPU in their place (`on_the_cpu.py`). What does not apply even so
is listed in `not_applicable.toml`, each test with its reason.
"""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import SkipTest

os.environ["BACKEND"] = "gloo"
os.environ.setdefault("WORLD_SIZE", "4")
if "TEMP_DIR" not in os.environ:  # ranks under mpirun get one for all
    FOLDER = tempfile.TemporaryDirectory(prefix="torch-suite-")
    os.environ["TEMP_DIR"] = FOLDER.name
for folder in ("test_dir", "barrier"):
    Path(os.environ["TEMP_DIR"], folder).mkdir(exist_ok=True)

import torch.distributed as dist  # noqa: E402
from marks import noted, skips  # noqa: E402
from torch.testing._internal.common_distributed import TEST_SKIPS  # noqa: E402
from torch.testing._internal.common_utils import set_rng_seed  # noqa: E402

with noted():
    from torch.testing._internal.distributed import distributed_test as theirs

from on_the_cpu import OnTheCPU, gpus_replaced  # noqa: E402

import minidist.torch_backend  # noqa: E402, F401

RANKS, MORE = 4, 8  # some tests want more
MORE_RANKS = TEST_SKIPS["small_worldsize"].message
SKIPS = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
FOR_GPUS = re.compile("GPU|CUDA|nccl", re.IGNORECASE)
# Those that take a model on the CPU if the variable says so, and else none.
AS_GLOO = re.compile("test_accumulate_gradients_no_sync")
NOT_APPLICABLE = tomllib.loads(Path(__file__).with_name("not_applicable.toml").read_text())


@contextmanager
def file_for_all(made: Any = theirs._rank_temp_file) -> Iterator[str]:
    """Name a file that rank 0 has made. Theirs removes it while others may still have to read."""
    with made() as name:
        yield name
        dist.barrier()


theirs._rank_temp_file = file_for_all


class OnProcesses(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc]
    """Their tests, without the processes that they start: a rank calls them itself."""

    def _barrier(self, *args: Any, **options: Any) -> None:
        """Wait for all ranks. Theirs counts processes, in files."""
        dist.barrier()

    @property
    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])


class OnThreads(OnProcesses):
    """The same for ranks that share a process: without torch's profiler, of which it has one."""

    def call_dist_op(self, title: str, is_async: bool, op: Any, *args: Any, **options: Any) -> None:
        """Call a collective, and a second one if the test has it; wait for both."""
        for name in ("expect_event", "profile_cuda", "tensor_shapes"):
            options.pop(name, None)
        second = options.pop("secondary_op_call", None)
        works = [op(*args, **options), *([second()] if second else [])]
        for work in works if is_async else ():
            work.wait()


def names() -> list[str]:
    """Return the names of all tests."""
    return sorted(name for name in dir(OnProcesses) if name.startswith("test_"))


def why_not(name: str, threads: bool) -> str:
    """Return why a test does not apply to us, as `not_applicable.toml` says; nothing if it does."""
    for part in ("everywhere", "on_threads" if threads else "on_processes"):
        for reason, tests in NOT_APPLICABLE[part].items():
            if name in tests:
                return str(reason)
    return ""


def wants_gpu(name: str) -> bool:
    """Tell whether a test is marked for GPUs."""
    return any(FOR_GPUS.search(why) for why in skips(getattr(OnProcesses, name)))


@contextmanager
def place_of(name: str) -> Iterator[None]:
    """Have a test find in this process what it needs."""
    with gpus_replaced() if wants_gpu(name) else nullcontext():
        yield


def run_on(kind: type[OnProcesses], name: str, rank: int) -> str:
    """Run a test as `rank`; return why it does not apply, or nothing if it has passed."""
    case = kind(name)
    case.rank = rank
    theirs.BACKEND = "gloo" if AS_GLOO.match(name) else "minidist"
    dist.init_process_group("minidist", timeout=timedelta(seconds=60))
    set_rng_seed()  # as their harness does: each rank of each test starts alike
    try:
        with OnTheCPU() if wants_gpu(name) else nullcontext():
            getattr(case, name)()
    except SkipTest as skip:
        return str(skip)
    except SystemExit as left:
        if left.code not in SKIPS:
            raise RuntimeError(f"it has ended its process with {left.code}") from left
        return SKIPS[left.code]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return ""
