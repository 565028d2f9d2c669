"""A run: what is trained on what, how, and by which generation of software.

    Setup(model("llama-70b"), machine("h100:64"), sequence=4096, batch=1024, tp=8, pp=2, dp=4,
    zero=1, sp=True)

`software.toml` says what each generation does.
"""

from dataclasses import dataclass, field
from functools import cache

from minidist.plan.compute import Share
from minidist.plan.device import Constants, Machine, entry
from minidist.plan.links import Group
from minidist.plan.model import Model


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
    reduces_each: bool = False
    width: int = 2
    passes: float = 1.0

    @staticmethod
    @cache
    def named(name: str) -> "Software":
        """Return an entry of the table."""
        said = entry("software", name)
        return Software(**{"name": name} | said | {"loss": tuple(said.get("loss", (16, 10)))})


@dataclass(frozen=True)
class Setup:
    """A run: what is trained on what, and how. `batch` sequences a step, `microbatch` of them at a
    time on a rank.

    `shard`: ranks that ZeRO shards over (0: all of dp x cp); the others replicate (HSDP).
    `recompute` is "none", "selective" (attention's scores), "op" (every other product and all that
    is element-wise), "half" (every other layer) or "full". `ends_less`: embedding and head count as
    a layer when layers are dealt out to stages; `cut` says how many each has. `fused_loss`: the
    loss is computed in pieces, and no logits are kept. `order`: the axes from the outermost, as
    Megatron numbers its ranks.
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
    schedule: str = "1f1b"
    sp: bool = False
    zero: int = 0
    shard: int = 0
    recompute: str = "none"
    bits8: float = 0.0
    offload: bool = False
    hidden_tensor: bool = False
    ends_less: bool = False
    fused_loss: bool = False
    cut: tuple[int, ...] = ()
    gradient_bytes: int = 0
    order: tuple[str, ...] = ("pp", "dp", "cp", "tp")
    software: Software = field(default_factory=lambda: Software.named("megatron-core"))
    known: Constants = field(default_factory=Constants.table, repr=False)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return max(1, round(self.batch / (self.dp * self.microbatch)))

    @property
    def reductions(self) -> int:
        """Microbatches whose gradients ZeRO 2 and 3 reduce together, after holding them whole; 1:
        each its own.
        """
        return 1 if self.software.reduces_each else self.microbatches

    @property
    def gradients(self) -> int:
        """Bytes of a gradient on its way: 16 bits, or 32 where the software keeps them so."""
        return self.gradient_bytes or self.software.gradients

    @property
    def share(self) -> Share:
        """What a rank computes of a layer."""
        return Share(
            self.machine.device, self.known, self.model, self.software.kernel, max(1, self.microbatch), self.sequence,
            self.tp, self.cp, self.ep, self.sp, self.bits8, self.software.width, self.software.passes,
        )  # fmt: skip

    @property
    def entry(self) -> int:
        """Bytes of a microbatch's activations between two layers, whole."""
        return self.share.tokens * self.model.hidden * self.software.width

    def group(self, *axes: str) -> Group:
        """Return the ranks along these axes."""
        node, inner, ranks, together = self.machine.node, 1, 1, 1
        for axis in reversed(self.order):
            if axis in axes:
                ranks *= getattr(self, axis)
                together *= min(getattr(self, axis), max(1, node // inner))
            inner *= getattr(self, axis)
        return Group(ranks, max(1, node // together))

    @property
    def sharded(self) -> Group:
        """The ranks with other data and equal parameters over which ZeRO shards: dp x cp, or
        `shard` of them.
        """
        data = self.group("dp", "cp")
        return Group(
            self.shard or data.ranks,
            self.tp if self.shard else data.stride,
            self.software.rails or self.zero < 3,
        )

    @property
    def copies(self) -> Group:
        """The ranks with the same experts, over which ZeRO shards those: every `ep`-th of
        `sharded`.
        """
        same = self.sharded
        return Group(max(1, same.ranks // self.ep), same.stride * self.ep, same.rails)

    @property
    def dense_layer(self) -> float:
        """Parameters of a layer on this rank but for its routed experts. A router is whole on every
        rank.
        """
        model = self.model
        router = model.hidden * model.experts
        return (model.layer - model.experts * model.expert - router) / self.tp + router

    @property
    def held_experts(self) -> float:
        """Parameters of a layer's routed experts on this rank: whole experts are dealt out over ep
        x tp ranks.
        """
        return (
            float(-(-self.model.experts // (self.ep * self.tp)) * self.model.expert)
            if self.model.experts
            else 0.0
        )

    @property
    def parts(self) -> tuple[tuple[float, Group], ...]:
        """Parameters of a layer on this rank, each with the ranks that hold the same ones.

        The first part has all but experts. Experts that ranks have shared out have fewer copies: dp
        x cp / ep.
        """
        if self.ep == 1:
            return ((self.dense_layer + self.held_experts, self.sharded),)
        return ((self.dense_layer, self.sharded), (self.held_experts, self.copies))

    def site(self, stage: int) -> Machine:
        """Return where a stage of the pipeline is: of two sites, the slower one has the last
        stages.
        """
        fast = self.machine
        return fast.slower if fast.slower and stage >= fast.gpus * self.pp // fast.total else fast

    def layers(self) -> tuple[float, ...]:
        """Return the layers of each stage."""
        if self.cut or not self.ends_less or self.pp == 1:
            return self.cut or (self.model.layers / self.pp,) * self.pp
        each = (self.model.layers + 2) / self.pp
        return tuple(each - (i in (0, self.pp - 1)) for i in range(self.pp))
