"""One rank of `mpirun -n 4`: runs tests of torch one after the other; rank 0 prints a line of each.

A test that fails ends the job: the ranks no longer stand at the same place.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

warnings.simplefilter("ignore")

import torch.distributed as dist  # noqa: E402
from their_tests import OnProcesses, place_of, run_on  # noqa: E402

import minidist  # noqa: E402


def main(names: list[str]) -> None:
    """Run the tests, and say of each why it does not apply; nothing if it has passed."""
    comm = minidist.init(limit=60)
    for name in names:
        # torch's tests leave the level that they have set: each has a process of its own there
        os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
        dist.set_debug_level(dist.DebugLevel.OFF)
        with place_of(name):
            said = run_on(OnProcesses, name, comm.rank)
        skipped = [why for why in comm.all_gather_object(said) if why]
        if comm.rank == 0:
            print(json.dumps(["a test", name, skipped[0] if skipped else ""]), flush=True)


main(sys.argv[1:])
