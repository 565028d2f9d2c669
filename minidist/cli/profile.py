"""`train --profile FOLDER`: what torch's own profiler sees of a few steps, one file a rank.

    step 1       step 2   step 3   step 4       step 5 ...
    warm-up      └─── rank-0000.json ───┘       at full speed

Spans stand in it by name, above the operators and, on a GPU, the kernels that they launched.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, schedule

STEPS = 3


class Profiler(profile):
    """A `torch.profiler.profile` of the second step of a run and those behind it; call `step` after each.

    The first step is warm-up: it allocates memory, connects ranks, starts the profiler, perhaps compiles.

    Parameters
    ----------
    first_step : int
        Steps that were taken before the run was resumed: the profile numbers steps as the run does.
    """

    def __init__(self, folder: Path, rank: int, first_step: int) -> None:
        steps = schedule(wait=0, warmup=1, active=STEPS, repeat=1)
        self.file, self.rank, self.warm_up = folder / f"rank-{rank:04d}.json", rank, first_step + 1
        super().__init__(
            schedule=lambda step: steps(max(0, step - self.warm_up)),
            on_trace_ready=Profiler.write,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),  # streams, too
        )
        self.step_num = self.warm_up

    def write(self) -> None:
        """Write the file, and say so on rank 0. If that fails, go on: it is no reason to lose the run."""
        last = min(self.step_num - 1, self.warm_up + STEPS)
        if last == self.warm_up:
            said = "no profile was written: it takes a run of 2 steps, of which the first is warm-up"
        else:
            said = f"profile of steps {self.warm_up + 1} to {last} written to {self.file.parent}, a file a rank"
            try:
                self.file.write_text("")  # torch would not raise what is wrong
                self.export_chrome_trace(str(self.file))
            except (OSError, RuntimeError) as error:
                print(f"minidist train: the profile {self.file} cannot be written ({error})", file=sys.stderr)
                return
        if self.rank == 0:
            print(said, flush=True)
