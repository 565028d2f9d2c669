"""What is asked for: how a model is spread over a mesh, and one table of what can be combined.

    schedule            ZeRO 0 (DDP)   1     2     3
    no pipeline         yes            yes   yes   yes
    gpipe, 1f1b         yes            yes   yes   yes     one stage a rank, whose units are gathered like a model's
    all others          yes            yes   no    no      several stages a rank, or weight gradients put off

Each of these can be combined with tensor and sequence parallelism, recomputation and every
precision of 16 bits or more; `Recipe.supported` also says what goes with adapters and 8 bits. ZeRO 2
and 3 keep no whole gradients, so in a step of m microbatches they reduce m times, with a pipeline or
without.

Each strategy declares its options in its own folder, in `options.py`. A `Recipe` has them all, and
so have the command line and the planner. `apply.py` asks each strategy whether they fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from minidist.full.context.options import ContextParallelOptions
from minidist.full.ddp.options import DataParallelOptions, ShardingOptions
from minidist.full.expert.options import ExpertParallelOptions
from minidist.full.layers.options import (
    AdapterOptions,
    AutocastOptions,
    CompileOptions,
    Float8Options,
    RecomputeOptions,
)
from minidist.full.mesh import Layout
from minidist.full.pipeline import NAMES
from minidist.full.pipeline.actions import Plan
from minidist.full.pipeline.options import PipelineOptions
from minidist.full.pipeline.schedules import CHUNKED, V_SHAPED
from minidist.full.slow_wires.options import SiteOptions
from minidist.full.tensor.options import TensorParallelOptions

NO_PIPELINE, OWN_PLAN = "no pipeline", "a plan of one's own"


class RecipeError(ValueError):
    """A combination that is not offered, or does not fit the mesh or the model.

    The message says what does.
    """


def offered(schedule: str) -> tuple[int | str, ...]:
    """Return what can be combined with a schedule: stages of ZeRO, and options.

    8 bits put no weight gradients off.
    """
    if schedule in (NO_PIPELINE, "gpipe", "1f1b"):
        return (0, 1, 2, 3, "cp", "ep", "lora", "fp8")
    if schedule in ("naive", "interleaved"):
        return (0, 1, "cp", "ep", "lora", "fp8")
    return (0, 1, "cp", "ep", "lora")


@dataclass(frozen=True)
class Recipe(
    RecomputeOptions,
    AutocastOptions,
    Float8Options,
    AdapterOptions,
    CompileOptions,
    SiteOptions,
    ShardingOptions,
    DataParallelOptions,
    PipelineOptions,
    ExpertParallelOptions,
    ContextParallelOptions,
    TensorParallelOptions,
):
    """How a model is spread over a mesh, and what each rank does with its layers. (A dataclass has
    the fields of its last base first.)

    Its options are those of its strategies: see `TensorParallelOptions`, `ContextParallelOptions`,
    `ExpertParallelOptions`, `PipelineOptions`, `DataParallelOptions`, `ShardingOptions`,
    `SiteOptions`, `AdapterOptions`, `Float8Options`, `AutocastOptions`, `RecomputeOptions` and
    `CompileOptions`. An option without effect is refused, unless the reason is that an axis has
    only one rank.
    """

    supported: ClassVar[Mapping[str, tuple[int | str, ...]]] = {
        name: offered(name) for name in (NO_PIPELINE, *NAMES, OWN_PLAN)
    }
    """What can be combined with each schedule."""

    @property
    def own_plan(self) -> Plan | None:
        """The user's own plan, if the recipe has one in place of the name of a schedule."""
        return self.schedule if isinstance(self.schedule, Plan) else None

    def row(self, layout: Layout) -> str:
        """Return the row of `supported` in which a layout with this recipe stands."""
        if layout.pp == 1:
            return NO_PIPELINE
        return OWN_PLAN if self.own_plan else str(self.schedule)

    def goes_with(self, row: str) -> bool:
        """Tell whether this row of `supported` has all that the recipe asks for."""
        offered = self.supported[row]
        return self.zero in offered and (not self.fp8 or "fp8" in offered)

    def settled(self, layout: Layout) -> "Recipe":
        """Return the recipe with the numbers that 0 stands for: of microbatches, and of chunks."""
        if self.own_plan:
            count = self.own_plan.microbatches
        else:
            count = self.microbatches or (2 * layout.pp if layout.pp > 1 else 1)
        chunks = self.chunks or (2 if self.schedule in (*CHUNKED, *V_SHAPED) else 1)
        return replace(self, microbatches=count, chunks=chunks)
