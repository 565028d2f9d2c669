"""`train --profile FOLDER`: what torch's own profiler sees of a few steps, one file a rank.

    step 1       step 2   step 3   step 4       step 5 ...
    warm-up      └─── rank-0000.json ───┘       at full speed

Spans stand in it by name, above the operators and, on a GPU, the kernels that they launched.
"""

import sys
from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, schedule

STEPS = 3


def profiler(folder: str, rank: int, first_step: int) -> profile:
    """Return a profiler of the second step of a run and those behind it, whose `step` is called
    after each.

    The first step is warm-up: it allocates memory, connects ranks, starts the profiler, perhaps
    compiles. `first_step` steps were taken before the run was resumed: the profile numbers steps as
    the run does.
    """
    warm_up, file = first_step + 1, Path(folder, f"rank-{rank:04d}.json")
    plan = schedule(skip_first=warm_up, wait=0, warmup=1, active=STEPS, repeat=1)

    def write(done: profile) -> None:
        last = min(done.step_num - 1, warm_up + STEPS)
        said = f"profile of steps {warm_up + 1} to {last} written to {folder}, a file a rank"
        if last == warm_up:
            said = (
                "no profile was written: it takes a run of 2 steps, of which the first is warm-up"
            )
        else:
            try:
                file.write_text("")  # torch would not raise what is wrong
                done.export_chrome_trace(str(file))
            except (OSError, RuntimeError) as error:  # no reason to lose the run
                print(
                    f"minidist train: the profile {file} cannot be written ({error})",
                    file=sys.stderr,
                )
                return
        if rank == 0:
            print(said, flush=True)

    streams_too = _ExperimentalConfig(profile_all_threads=True)
    numbered = profile(schedule=plan, on_trace_ready=write, experimental_config=streams_too)
    numbered.step_num, numbered.current_action = warm_up, plan(warm_up)
    return numbered
