"""Pipeline schedules as data: planned, checked, given sends and receives, simulated. Nothing here imports torch.

plan("1f1b", 4, 8) ─▶ check ─▶ with_communication ─▶ an executor
                   ╰▶ simulate ─▶ bubble, peaks, a drawing
"""

from minidist.parallel.pipeline.actions import Action, Plan, read_plan
from minidist.parallel.pipeline.check import check
from minidist.parallel.pipeline.communicate import with_communication
from minidist.parallel.pipeline.errors import ScheduleError
from minidist.parallel.pipeline.schedules import NAMES, plan
from minidist.parallel.pipeline.simulate import Timeline, peak_activations, peak_deferred, simulate

__all__ = [
    "NAMES",
    "Action",
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
