"""What a GPU holds at its peak, by category: on the stage of the pipeline that holds most.

    states        which parameters a rank has, and the bytes of weights, gradients and optimizer; ZeRO divides them
                  by the ranks that have the same ones, and experts have fewer copies than the rest
    activations   what a layer keeps of a microbatch for backward, and what it needs while it is at work
    engine        the same for Megatron Core, whose layers are Transformer Engine's: in 16 bits, in 8, with experts
    flight        of how many layers and microbatches that is held at once: by schedule
    peak          all of it, at the moment at which it is most; and how much of that a meter sees

The files are `states.py`, `activations.py`, `engine.py`, `flight.py` and `peak.py`. By itself stands
`chain.py`: which activations to recompute, so that the others fit into a budget.
The formulas of the papers themselves are in `equation.py`.
"""

from minidist.plan.memory.flight import deferred, in_flight
from minidist.plan.memory.peak import GB, Bytes, bytes_held, metered
from minidist.plan.memory.states import (
    MOMENTS,
    Parts,
    ends_parameters,
    gathered,
    parts_of,
    states,
    table_parameters,
)

__all__ = [
    "GB",
    "MOMENTS",
    "Bytes",
    "Parts",
    "bytes_held",
    "deferred",
    "ends_parameters",
    "gathered",
    "in_flight",
    "metered",
    "parts_of",
    "states",
    "table_parameters",
]
