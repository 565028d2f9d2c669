"""How long a step takes, and where it goes: computing, recomputing, what is exposed along each axis, the bubble.

    layer        compute.py, times the factor of the software; never less than a host needs to launch it
    tensor       collectives of a layer stand in its way (pipelined products hide `hidden_tensor` of them)
    context      keys and values hide behind the attention they are for
    sharding     ZeRO-3: gathers hide behind the layer before; computing beside them takes `stolen` of them longer
    pipeline     messages that wait; bubble: the package's own plans on a clock, or the same in closed form
    data         what is left of the gradients' reduction behind the last backward; all of it without overlap

(Narayanan et al. 2021, sections 2 and 3; Korthikanti et al. 2022, section 4; Rajbhandari et al. 2020, section 7.)
"""

from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from minidist.parallel.pipeline.schedules import plan as pipeline_plan
from minidist.parallel.pipeline.simulate import simulate
from minidist.plan import links
from minidist.plan.compute import Layer, Share, head, layer
from minidist.plan.device import Constants, Machine, table
from minidist.plan.links import Group
from minidist.plan.model import Model

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")  # of the package; others are known in closed form alone
Seconds = dict[str, float]


@dataclass(frozen=True)
class Software:
    """What a generation of software does: `software.toml` explains each field."""

    name: str
    factor: str
    kernel: str
    stolen: str = "stolen"
    loss: tuple[int, int] = (16, 10)
    overlap: bool = False
    early_stop: bool = False
    regather: bool = False
    rails: bool = True
    sends_wait: bool = True
    parameters: int = 2
    gradients: int = 2
    optimizer: int = 12
    kept_logit: int = 10
    measured: str = "driver"

    @staticmethod
    @cache
    def named(name: str) -> "Software":
        """Return an entry of the table."""
        entry = table("software")[name]
        return Software(**{"name": name} | entry | {"loss": tuple(entry.get("loss", (16, 10)))})


@dataclass(frozen=True)
class Setup:
    """A run: what is trained on what, and how. `batch` sequences a step, `microbatch` of them at a time on a rank.

    `shard`: ranks that ZeRO shards over (0: all of dp x cp); the others replicate (HSDP). `recompute` is "none",
    "selective" (attention's scores), "op" (every other product and all that is element-wise), "half" (every other
    layer) or "full". `ends_less`: embedding and head count as a layer when layers are dealt out to stages; `cut` says
    how many each has. `fused_loss`: the loss is computed in pieces, and no logits are kept.
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
    software: Software = field(default_factory=lambda: Software.named("megatron-core"))
    known: Constants = field(default_factory=Constants.table, repr=False)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return max(1, round(self.batch / (self.dp * self.microbatch)))

    @property
    def gradients(self) -> int:
        """Bytes of a gradient on its way: 16 bits, or 32 where the software keeps them so."""
        return self.gradient_bytes or self.software.gradients

    @property
    def share(self) -> Share:
        """What a rank computes of a layer."""
        return Share(
            self.machine.device, self.known, self.model, self.software.kernel, max(1, self.microbatch), self.sequence,
            self.tp, self.cp, self.ep, self.sp, self.bits8,
        )  # fmt: skip

    @property
    def sharded(self) -> Group:
        """The ranks with other data and equal parameters over which ZeRO shards: dp x cp, or `shard` of them."""
        return Group(self.shard or self.dp * self.cp, self.tp, self.software.rails or self.zero < 3)

    @property
    def held_layer(self) -> float:
        """Parameters of a layer on this rank."""
        model = self.model
        return (model.layer - model.experts * model.expert * (1 - 1 / self.ep)) / self.tp

    def site(self, stage: int) -> Machine:
        """Return where a stage of the pipeline is: of two sites, the slower one has the last stages."""
        fast = self.machine
        return fast.slower if fast.slower and stage >= fast.gpus * self.pp // fast.total else fast

    def layers(self) -> tuple[float, ...]:
        """Return the layers of each stage."""
        if self.cut or not self.ends_less or self.pp == 1:
            return self.cut or (self.model.layers / self.pp,) * self.pp
        each = (self.model.layers + 2) / self.pp
        return tuple(each - (i in (0, self.pp - 1)) for i in range(self.pp))


class Pass(NamedTuple):
    """A layer and a microbatch, forward or backward: seconds by kind, and the whole, with what hides behind it."""

    kinds: Seconds
    whole: float


def recomputed(run: Setup, one: Layer) -> float:
    """Return the seconds that a layer's backward spends on what was not kept."""
    whole = one.forward + one.attention - (one.last if run.software.early_stop else 0.0)
    again = {"selective": one.attention, "op": one.forward - one.products / 2, "half": whole / 2, "full": whole}
    return again.get(run.recompute, 0.0)


@cache
def passes(run: Setup) -> tuple[Pass, Pass]:
    """Return a layer's forward and its backward."""
    known, machine, model, share = run.known, run.machine, run.model, run.share
    one, factor, full = layer(share), known[run.software.factor], run.recompute == "full"
    message = share.tokens * model.hidden * 2
    reduce = (1 if model.parallel else 2) * links.all_reduce(message, Group(run.tp), machine, known)
    reduce *= 1 - known["hidden_tensor"] if run.hidden_tensor else 1
    reduce_again = {"full": reduce, "op": reduce / 2, "half": reduce / 2}.get(run.recompute, 0.0)
    keys = share.tokens * 2 * model.kv * model.head_dim // run.tp * 2
    hop = links.send(keys, Group(run.cp, run.tp), machine, known) * (run.cp - 1) if run.cp > 1 else 0.0
    late, late_back = max(0.0, hop - one.attention), max(0.0, 2 * hop - one.attention_back)
    rows = share.tokens * model.top_k * model.hidden * 2 / run.tp
    routed = 2 * links.exchange(rows, Group(run.ep, run.tp), machine, known) if model.experts else 0.0
    forward = {"computing": factor * (one.forward + one.attention), "tensor": reduce, "context": late, "expert": routed}
    backward = {
        "computing": factor * (one.backward + one.attention_back),
        "recomputing": factor * recomputed(run, one),
        "tensor": reduce + reduce_again,
        "context": late_back + (late if full else 0.0),
        "expert": routed * (2 if full else 1),
    }
    whole = max(sum(forward.values()), known["host"])
    whole_back = max(sum(backward.values()), known["host"] * (3 if full else 2))
    if run.zero == 3:
        gathered = links.gather(run.held_layer * 2, run.sharded, machine, known)
        scattered = links.gather(run.held_layer * run.gradients, run.sharded, machine, known)
        again = gathered * (2 if run.software.regather and full else 1)
        whole, whole_back = beside(run, whole, gathered), beside(run, whole_back, again + scattered)
    return Pass(forward, whole), Pass(backward, whole_back)


def beside(run: Setup, computing: float, talking: float) -> float:
    """Return how long computing takes with a collective beside it: the longer, and what the collective takes away."""
    return max(computing + run.known[run.software.stolen] * min(computing, talking), talking)


def step(run: Setup, exact: bool = False) -> Seconds:
    """Return where the seconds of a step go: on the slowest stage, with the bubble that the others leave it.

    `exact` runs the schedule's plan on a clock; otherwise its closed form counts, which is within 2 % and much faster.
    """
    known, machine, model, pp, m, share = run.known, run.machine, run.model, run.pp, run.microbatches, run.share
    both = [passes(replace(run, machine=run.site(i))) if machine.slower else passes(run) for i in range(pp)]
    ends = [0.0] * pp
    ends[0] += share.streamed(4 * share.tokens * model.hidden)
    ends[-1] += head(replace(share, device=run.site(pp - 1).device), run.software.loss)
    layers = run.layers()
    stages = [layers[i] * (both[i][0].whole + both[i][1].whole) + ends[i] for i in range(pp)]
    slow = max(range(pp), key=lambda i: stages[i])
    forward, backward = both[slow]
    sent, bubble = 0.0, 0.0
    if pp > 1:
        boundary = share.tokens * model.hidden * 2
        sent = links.send(boundary / run.tp, Group(pp, run.tp * run.cp * run.dp), machine, known)
        sent += links.gather(boundary, Group(run.tp), machine, known)
        sent = max(sent, boundary * run.dp * run.cp / machine.thin if machine.slower else 0.0)
    waits = 2 * sent * run.chunks if run.software.sends_wait else 0.0
    if pp > 1:
        exact = exact and run.schedule in SCHEDULES
        bubble = (
            simulated(run, stages, forward, backward, sent, waits) if exact else filling(run, stages, backward, sent)
        )
    kinds = {name: m * layers[slow] * (forward.kinds.get(name, 0.0) + each) for name, each in backward.kinds.items()}
    kinds["computing"] += m * ends[slow]
    kinds["sharding"] = m * stages[slow] - sum(kinds.values())
    kinds |= {"pipeline": m * waits, "bubble": bubble}
    held = layers[slow] * run.held_layer + model.vocabulary * model.hidden / run.tp
    kinds["data"] = reduction(run, held, max(layers) * forward.whole, max(layers) * backward.whole)
    owned = held / (run.sharded.ranks if run.zero else 1)
    offloaded = owned * (run.gradients + 2 + known["optimizer_bytes"]) / known["host_link"] if run.offload else 0.0
    kinds["optimizer"] = share.streamed(known["optimizer_bytes"] * owned) + offloaded
    return kinds | {"other": known["synchronize"]}


def filling(run: Setup, stages: list[float], backward: Pass, sent: float) -> float:
    """Return the seconds in which the slowest stage waits, in closed form: for the others, once a step."""
    share = 1 / run.chunks
    if run.schedule in ("zb-1p", "zb-h1"):  # F + I - W of F + I + W, where W is half of the backward's computing
        share = 1 - backward.kinds["computing"] * max(run.layers()) / max(stages)
    elif run.schedule.startswith(("zb-2p", "zb-h2", "zb-v")):
        share = 0.02
    return (sum(stages) - max(stages)) * share + 2 * (run.pp - 1) * sent


def simulated(run: Setup, stages: list[float], forward: Pass, backward: Pass, sent: float, waits: float) -> float:
    """Return the same from the schedule's plan on a clock. Its steady part is cut short: it repeats itself."""
    m = min(run.microbatches, 4 * run.pp)
    plan = pipeline_plan(run.schedule, run.pp, m, run.chunks)
    each = [(stages[plan.rank_of[stage]] + waits) * run.pp / plan.stages for stage in range(plan.stages)]
    ahead = forward.whole / (forward.whole + backward.whole)
    half = [(1 - ahead) / 2 * seconds for seconds in each]
    whole = [(1 - ahead) * seconds for seconds in each]
    clock = simulate(plan, [ahead * seconds for seconds in each], whole, half, half, latency=sent)
    return clock.length - m * (max(stages) + waits)


def reduction(run: Setup, held: float, forward: float, backward: float) -> float:
    """Return the seconds of reducing gradients that no computing hides."""
    known, machine, ranks = run.known, run.machine, run.dp * run.cp
    hides = backward
    if run.zero == 3:
        copies = Group(ranks // run.sharded.ranks, run.tp * run.sharded.ranks)
        talking = links.all_reduce(held * run.gradients / run.sharded.ranks, copies, machine, known)
    elif run.zero:
        each = run.microbatches if run.zero == 2 and run.pp == 1 else 1  # no rank keeps whole gradients
        talking = each * links.gather(held * run.gradients, run.sharded, machine, known)
        talking += links.gather(held * 2, run.sharded, machine, known)
        hides = each * backward + (forward if run.zero == 1 else 0.0)
    else:
        talking = links.all_reduce(held * run.gradients, run.sharded, machine, known)
    if not run.software.overlap:
        return talking
    hidden = min(talking, hides)
    return talking - hidden + known[run.software.stolen] * hidden
