"""The options of a pipeline."""

from collections.abc import Sequence
from dataclasses import dataclass

from minidist.full.options import NOT_NEGATIVE, Needs, one_of, option
from minidist.full.pipeline.actions import Plan
from minidist.full.pipeline.schedules import CHUNKED, NAMES

STAGES = Needs("--pp RANKS", "pp", lambda ranks: ranks > 1)
INTERLEAVED = Needs(f"--schedule {' or '.join(CHUNKED)}", "schedule", lambda name: name in CHUNKED)


@dataclass(frozen=True)
class PipelineOptions:
    """How the layers are shared out among stages, and in which order stages compute.

    Attributes
    ----------
    schedule : str or Plan
        The name of a schedule, or your own plan without sends and receives.
    chunks : int
        Stages a rank, for interleaved and zb1p. 0: 2 for these two, else 1.
    microbatches : int
        Microbatches of a step, on each rank of the data axis; without a pipeline, gradients
        accumulate over them. 0: those of your own plan, two for each stage of a pipeline, or 1
        without one.
    offload_stages : float
        Let the weights of a stage leave for host memory while it waits, if the rank has several
        stages: how long one such copy takes, as a multiple of a stage's forward. 0: they stay.
        For weights of b bytes an element, t tokens in a microbatch, a link of w bytes a second and
        a device of f operations a second it is about b f / (2 t w); see `with_offload`.
    costs : sequence of float, optional
        The cost of each layer, by which the pipeline is cut; by default all cost the same. See
        `balance`.
    light_ends : bool
        Count the embedding and the head as a layer each when the pipeline is cut, so that the first
        and the last stage have a layer less, as Llama 3 405B had, or none.
    """

    schedule: str | Plan = option(
        "1f1b", f"of the pipeline: {', '.join(NAMES)}", one_of(*NAMES), needs=STAGES, kind=str
    )
    chunks: int = option(
        0, "stages a rank, of interleaved and zb1p; 0: 2", NOT_NEGATIVE, needs=INTERLEAVED
    )
    microbatches: int = option(
        0, "microbatches a step in a pipeline; 0: two for each stage", NOT_NEGATIVE, needs=STAGES
    )
    offload_stages: float = option(
        0.0,
        "let weights of stages that wait leave for host memory: how many of a stage's forwards a "
        "copy takes; 0: they stay",
        NOT_NEGATIVE,
        needs=STAGES,
    )
    costs: Sequence[float] | None = option(None, "the cost of each layer", flag=False)
    light_ends: bool = option(
        False, "cut stages as if embedding and head were two more layers", needs=STAGES
    )
