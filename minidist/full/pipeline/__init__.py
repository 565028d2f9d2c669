"""Pipelines: ranks have stages of a model, microbatches pass through the stages, and a schedule is
data.

    the book              here
    schedule              `Plan`: for each rank its actions, also of several stages and with messages
    check                 `order.py` and `check` prove a plan; a `ScheduleError` shows what is wrong
    forward               `Run.forward`: 2F0 is microbatch 0 through stage 2
    backward              `Run.backward`; or in two, for the input now, and for the weights later
    recv                  `Run.receive` posts it early, and `Run.take` waits where it is used
    bubble, in_flight     `simulate`, and `peak_activations`

Read `minidist/pipeline.py` first: 1F1B by hand, and schedules of forwards and backwards as data.
Then read what works for any schedule:

plan("1f1b", 4, 8) ─▶ check ─▶ with_offload ─▶ with_communication ─▶ executor.py
                   │           (if wanted)
                   ╰▶ simulate ─▶ bubble, peaks, a drawing

`actions.py` and `schedules.py` make plans, `order.py` and `check.py` prove them (`errors.py` shows
what is wrong), `simulate.py` tells their cost, `communicate.py` adds messages and reductions, and
`executor.py` runs them, with `stage.py` and `weight_gradients.py`. Nothing that is exported here
imports torch. `options.py` has what a user can ask for. The folder `offload/` lets the weights of
stages that wait leave for host memory.

To add a kind of action, or to change one, name it in `actions.py` (`Kind`). `order.py` says what it waits for
(`needs`), `check.py` how often a plan has it, `simulate.py` what it costs, `executor.py` how it is
done (`DO`), and `draw/pipeline.py` its colour. `communicate.py` decides where in a rank's line
the reduction of gradients stands, and `executor.py` (`Pipeline.step`) in which backward reducing
really begins.
"""

from minidist.full.pipeline.actions import Action, Kind, Plan, read_plan
from minidist.full.pipeline.check import check
from minidist.full.pipeline.communicate import with_communication
from minidist.full.pipeline.errors import ScheduleError
from minidist.full.pipeline.offload.pauses import with_offload
from minidist.full.pipeline.schedules import NAMES, plan
from minidist.full.pipeline.simulate import Timeline, peak_activations, peak_deferred, simulate

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
    "with_offload",
]
