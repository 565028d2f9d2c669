"""Pipelines: stages of a model on different ranks, microbatches that pass through them, and schedules as data.

Read `plain.py`, one page: 1F1B by hand. Then what any schedule needs:

plan("1f1b", 4, 8) ─▶ check ─▶ with_communication ─▶ executor.py
                   ╰▶ simulate ─▶ bubble, peaks, a drawing

`actions.py`, `schedules.py` and `zero_bubble.py` plan, `order.py` and `check.py` prove (`errors.py` shows what is
wrong), `simulate.py` tells what a plan costs, `communicate.py` adds messages and reductions, `executor.py` runs, with
`stage.py` and `weight_gradients.py`. Of what is exported here, nothing imports torch.

A new kind of action is named in `actions.py` (`Kind`). `order.py` says what it waits for (`needs`), `check.py` how
often it stands in a plan, `simulate.py` what it costs, `executor.py` does it (`Run.do`), and `draw/pipeline.py` gives
it a colour. Where a rank's line names the reduction of gradients is decided in `communicate.py`; with which backward
the reducing really begins, in `executor.py` (`Pipeline.step`).
"""

from minidist.parallel.pipeline.actions import Action, Kind, Plan, read_plan
from minidist.parallel.pipeline.check import check
from minidist.parallel.pipeline.communicate import with_communication
from minidist.parallel.pipeline.errors import ScheduleError
from minidist.parallel.pipeline.schedules import NAMES, plan
from minidist.parallel.pipeline.simulate import Timeline, peak_activations, peak_deferred, simulate

__all__ = [
    "NAMES",
    "Action",
    "Kind",
    "Plan",
    "ScheduleError",
    "Timeline",
    "check",
    "peak_activations",
    "peak_deferred",
    "plan",
    "read_plan",
    "simulate",
    "with_communication",
]
