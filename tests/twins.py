"""Run under torchrun: train every lesson's twin in both ways, one after the other, and write the
losses as JSON.

torchrun twins.py OUT lessons/04_data_parallel/cluster.py lessons/05_zero/cluster.py ...
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

import minidist
from minidist.course.lesson import load_module


def main(out: str, paths: list[str]) -> None:
    comm = minidist.init()
    cuda = comm.wire.carries_cuda
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    told: dict[str, dict[str, Any]] = {}
    for path in paths:
        told[Path(path).parent.name] = facts = {
            "device": device.type,
            "tolerance": 1e-9,
            "production": [],
            "ours": [],
        }
        try:
            twin = load_module("cluster", Path(path))
            facts["tolerance"] = getattr(twin, "TOLERANCE", 1e-9)
            for name in ("production", "ours"):
                facts[name] = list(getattr(twin, name)(comm, device))
        except Exception:
            print(
                f"{path}, rank {comm.rank}:\n{traceback.format_exc()}", file=sys.stderr, flush=True
            )
        if len({len(losses) for losses in comm.all_gather_object(facts["ours"])}) > 1:
            raise SystemExit(f"{path}: failed on some ranks, so the others cannot go on")
    everyones = comm.all_gather_object(told)
    if comm.rank == 0:
        Path(out).write_text(json.dumps(everyones))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
