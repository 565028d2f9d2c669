"""A run: what is trained on what, how, and by which generation of software.

    Setup(model("llama-70b"), machine("h100:64"), sequence=4096, batch=1024, tp=8, pp=2, dp=4,
    zero=1, sp=True)

`software.toml` says what each generation does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, wraps
from typing import TypeVar

from minidist.full.context.options import ContextParallelOptions
from minidist.full.ddp.options import ShardingOptions
from minidist.full.layers.options import AutocastOptions, RecomputeOptions
from minidist.full.pipeline.options import PipelineOptions
from minidist.full.pipeline.schedules import V_SHAPED
from minidist.full.tensor.options import TensorParallelOptions
from minidist.plan.compute.products import Share
from minidist.plan.device import Constants, Machine, entry
from minidist.plan.links import Group, Network
from minidist.plan.model import Model

Answer = TypeVar("Answer")


def once(of: Callable[["Setup"], Answer]) -> Callable[["Setup"], Answer]:
    """Have a function of a run remember its answer, in the run itself: a run never changes."""
    place = f"{of.__module__}.{of.__qualname__}"

    @wraps(of)
    def remembered(run: "Setup") -> Answer:
        kept = vars(run)
        if place not in kept:
            kept[place] = of(run)
        answer: Answer = kept[place]
        return answer

    return remembered


@dataclass(frozen=True)
class Software:
    """What a generation of software does: `software.toml` explains each field."""

    name: str
    factor: str
    kernel: str
    stolen: str = "stolen"
    loss: tuple[int, int] = (16, 10)
    overlap: bool = False
    gathers_ahead: bool = False
    early_stop: bool = False
    regather: bool = False
    rails: bool = True
    sends_wait: bool = True
    parameters: int = 2
    gradients: int = 2
    optimizer: int = 12
    kept_logit: int = 10
    measured: str = "driver"
    width: int = 2
    passes: float = 1.0
    hides_tensor: bool = False
    once_a_node: bool = False
    hides_experts: bool = False
    host_experts: str = "host_experts"
    host_expert: str = "none"
    engine: bool = False
    compiler: bool = False
    narrow: bool = False

    @staticmethod
    @cache
    def named(name: str) -> "Software":
        """Return an entry of the table."""
        said = entry("software", name)
        return Software(**{"name": name} | said | {"loss": tuple(said.get("loss", (16, 10)))})


@dataclass(frozen=True)
class Setup:
    """A run: what is trained on what, and how.

    `batch` sequences a step, `microbatch` of them at a time on a rank.

    `hsdp`: ranks that ZeRO shards over (0: all of dp x cp); the others replicate (HSDP).
    `recompute` is "none", "selective" (attention's scores), "op" (every other product and all that
    is element-wise), "parts" (of Megatron Core what is cheap: norms, the activation, what latent
    channels make), "half" (every other layer) or "full". `optimizer`: one of `MOMENTS`, of what it keeps
    beside masters. `ends_less`: embedding and head count as
    a layer when layers are dealt out to the stages of the plan, of which a rank may have several;
    `cut` says how many layers each has. `fused_loss`: the loss is computed in pieces, and no logits
    are kept. `precision` is that of products, "bf16" for any of 16 bits: see `PRECISIONS` of
    compute/products.py. `cp_comm`: "ring", or "ulysses" where each rank attends for a share of the
    heads. `order`: the axes from the outermost, as Megatron numbers its ranks. `autocast`, the dtype
    of products: parameters, gradients and the residual stream are in 32 bits.
    """

    model: Model
    machine: Machine
    sequence: int
    batch: int
    microbatch: int = 1
    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    chunks: int = 1
    schedule: str = str(PipelineOptions.schedule)
    sp: bool = TensorParallelOptions.sp
    zero: int = ShardingOptions.zero
    hsdp: int = ShardingOptions.hsdp
    recompute: str = RecomputeOptions.recompute
    optimizer: str = "adamw"
    precision: str = "bf16"
    autocast: str = AutocastOptions.autocast
    offload: bool = False
    hidden_tensor: bool = False
    ends_less: bool = False
    fused_loss: bool = False
    cut: tuple[int, ...] = ()
    gradient_bytes: int = 0
    cp_comm: str = ContextParallelOptions.cp_comm
    order: tuple[str, ...] = ("pp", "dp", "cp", "tp")
    software: Software = field(default_factory=lambda: Software.named("megatron-core"))
    known: Constants = field(default_factory=Constants.table, repr=False)

    @cached_property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return max(1, round(self.batch / (self.dp * self.microbatch)))

    @property
    def reductions(self) -> int:
        """How many microbatches ZeRO 2 and 3 accumulate before one reduction: they reduce each.

        A chunk of an interleaved pipeline has as many in a row as there are stages, and ZeRO 2 reduces
        these together.
        """
        if self.zero == 2 and self.chunks > 1:
            return min(self.pp, self.microbatches)
        return 1

    @property
    def bits8(self) -> bool:
        """Whether products have 8 bits, or fewer."""
        return self.precision != "bf16"

    @cached_property
    def gradients(self) -> int:
        """Bytes of a gradient that is sent: 2, or 4 if the software keeps gradients in 32 bits."""
        return 4 if self.autocast else self.gradient_bytes or self.software.gradients

    @property
    def kept_width(self) -> int:
        """Bytes of a weight that ZeRO gathers, and of an element of the residual stream."""
        return 4 if self.autocast else self.software.width

    @property
    def whole(self) -> int:
        """Ranks that share out what every rank along tp has all of without sequence parallelism."""
        return self.tp if self.sp else 1

    @cached_property
    def share(self) -> Share:
        """What a rank computes of a layer."""
        return Share(
            self.machine.device, self.known, self.model, self.software.kernel, max(1, self.microbatch), self.sequence,
            self.tp, self.cp, self.ep, self.sp, self.precision, self.software.width, self.software.passes,
            self.known["routing"],
        )  # fmt: skip

    @cached_property
    def entry(self) -> int:
        """Bytes of a microbatch's activations between two layers, not yet divided by tp."""
        return self.share.tokens * self.model.hidden * self.kept_width

    @property
    def reduced(self) -> float:
        """Bytes that tensor parallelism all-reduces in a layer: the mean of both directions.

        Under autocast outputs of products have half the width of `entry`, and gradients all of it.
        """
        return self.entry * (0.75 if self.autocast else 1.0)

    @cached_property
    def network(self) -> Network:
        """The links of the machine."""
        return Network(self.machine, self.known)

    def group(self, *axes: str) -> Group:
        """Return the ranks along these axes."""
        sizes = tuple([getattr(self, axis) for axis in self.order])
        return group_along(axes, self.order, sizes, self.machine.node)

    @cached_property
    def sharded(self) -> Group:
        """The ranks over which ZeRO shards: dp x cp, or `hsdp` of them.

        They have equal parameters and different data.
        """
        data = self.group("dp", "cp")
        return Group(
            self.hsdp or data.ranks,
            self.tp if self.hsdp else data.stride,
            self.software.rails or self.zero < 3,
        )

    @cached_property
    def copies(self) -> Group:
        """The ranks over which ZeRO shards experts, because they have the same ones: every `ep`-th
        of `sharded`.
        """
        same = self.sharded
        return Group(max(1, same.ranks // self.ep), same.stride * self.ep, same.rails)

    @cached_property
    def dense_layer(self) -> float:
        """Parameters of a layer on this rank without its routed experts.

        Every rank has all of the router, and of what makes latent channels.
        """
        model = self.model
        everywhere = model.hidden * (model.experts + model.latent_down)
        cut = model.layer - model.experts * model.expert - everywhere
        return cut / self.tp + everywhere

    @cached_property
    def own_experts(self) -> float:
        """Parameters of a layer's routed experts on this rank: ep x tp ranks share out the experts."""
        count = -(-self.model.experts // (self.ep * self.tp))
        return float(count * self.model.expert)

    @cached_property
    def parts(self) -> tuple[tuple[float, Group], ...]:
        """Parameters of a layer on this rank, each part with the ranks that have the same ones.

        With ep > 1 experts are a second part, because they have fewer copies: dp x cp / ep.
        """
        if self.ep == 1:
            return ((self.dense_layer + self.own_experts, self.sharded),)
        return ((self.dense_layer, self.sharded), (self.own_experts, self.copies))

    @cached_property
    def leading(self) -> "Setup":
        """The run whose layers are all as the leading dense ones of its model."""
        return replace(self, model=self.model.leading)

    def leading_layers(self, rank: int) -> float:
        """Return how many layers of a rank along pp are leading dense ones."""
        if not self.model.dense_layers:
            return 0.0
        left, leading = float(self.model.dense_layers), []
        for layers in self.stages():
            leading.append(min(left, layers))
            left -= leading[-1]
        return gathered_by(self.rank_of, tuple(leading))[rank]

    def site(self, stage: int) -> Machine:
        """Return where a stage of the pipeline is.

        If there are two sites, the slower one has the last stages.
        """
        fast = self.machine
        stages_of_fast = fast.gpus * self.pp // fast.total
        return fast.slower if fast.slower and stage >= stages_of_fast else fast

    @cached_property
    def stages_a_rank(self) -> int:
        """Stages of the schedule's plan that each rank has: its chunks, or both ways of a V."""
        return 2 if self.schedule in V_SHAPED and self.pp > 1 else self.chunks

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage of the plan, in order."""
        return ranks_of(self.pp, self.stages_a_rank, self.schedule in V_SHAPED)

    @once
    def stages(self) -> tuple[float, ...]:
        """Return the layers of each stage of the plan, in order.

        The last one also has those that predict tokens after the next.
        """
        found: tuple[float, ...] = self.cut
        if not found:
            found = dealt(self.model.layers, self.pp * self.stages_a_rank, self.ends_less)
        if self.model.predicted:
            found = (*found[:-1], found[-1] + self.model.predicted)
        return found

    @once
    def layers(self) -> tuple[float, ...]:
        """Return the layers of each rank along pp."""
        return gathered_by(self.rank_of, self.stages())


@cache
def group_along(
    axes: tuple[str, ...], order: tuple[str, ...], sizes: tuple[int, ...], node: int
) -> Group:
    """Return the ranks along some axes of a mesh, of which `order` has the outermost first."""
    ranks = together = inner = 1
    for axis, size in zip(reversed(order), reversed(sizes), strict=True):
        if axis in axes:
            ranks *= size
            near = max(1, node // inner)  # neighbours along this axis in a node
            together *= min(size, near)
        inner *= size
    return Group(ranks, max(1, node // together))


@cache
def ranks_of(ranks: int, stages_a_rank: int, is_v: bool) -> tuple[int, ...]:
    """Return the rank of each stage, round after round; in a V the second round goes back."""
    down = tuple(range(ranks))
    return down + down[::-1] if is_v and stages_a_rank > 1 else down * stages_a_rank


@cache
def dealt(layers: int, stages: int, ends_less: bool) -> tuple[float, ...]:
    """Return the layers of each stage as the package cuts them: the last stages have one more.

    Embedding and head may count as one each.
    """
    if ends_less and stages > 1:
        first, *inner, last = dealt(layers + 2, stages, False)
        return first - 1, *inner, last - 1
    each, left = divmod(layers, stages)
    return (each,) * (stages - left) + (each + 1,) * left


@cache
def gathered_by(rank_of: tuple[int, ...], stages: tuple[float, ...]) -> tuple[float, ...]:
    """Return the layers of each rank, of those of the stages."""
    found = [0.0] * (max(rank_of) + 1)
    for rank, layers in zip(rank_of, stages, strict=True):
        found[rank] += layers
    return tuple(found)
