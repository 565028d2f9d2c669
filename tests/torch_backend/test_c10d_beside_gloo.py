"""Groups of gloo go on working in a process that has the backend "minidist"."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import torch
import torch.distributed as dist
import minidist.torch_backend

dist.init_process_group("gloo", rank=0, world_size=1, init_method="file://" + sys.argv[1])
x, found = torch.arange(3.0), [None]
for call in (
    lambda out: dist.all_gather([out], x),  # gloo makes a tensor for this one and the next two
    lambda out: dist.gather(x, [out]),
    lambda out: dist.scatter(out, [x]),
    lambda out: dist.all_to_all_single(out, x),
    lambda out: dist.reduce_scatter(out, [x]),
):
    out = torch.zeros(3)
    call(out)
    assert torch.equal(out, x)
dist.all_gather_object(found, {"a": 1})
assert found == [{"a": 1}]
"""


def test_collectives_of_gloo(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
