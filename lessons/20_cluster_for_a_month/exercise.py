"""Lesson 20: a cluster for a month. How long does a run take, does it fit, what does it cost, and
what can go wrong?

    operations ──▶ seconds of a step ──▶ days ──▶ money
    parameters ──▶ bytes of a GPU    ──▶ does it fit?

Fill in the functions; their docstrings are the contract. Ranks are numbered along tp first, then
dp, then pp: a tp group is tp neighbouring ranks, a dp group lies within tp * dp neighbouring ranks.
You are building what `minidist.plan` does, so calling it scores nothing. You need no other module
of the package, and you send no messages.

    python exercise.py                      try it
    python -m minidist grade 20             points, and what is still wrong
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import minidist

# ---------------------------------------------------------------- given: do not change these


@dataclass(frozen=True)
class Model:
    """What is trained."""

    parameters: float  # N, of the whole model
    layers: int  # L
    hidden: int  # h, channels
    heads: int  # of attention, in each layer
    sequence: int  # s, tokens of a sequence


@dataclass(frozen=True)
class Machine:
    """What is rented. Mind the units: they are those in which each number is usually given."""

    gpus: int  # all together
    node: int  # GPUs of a node
    peak: float  # FLOP/s of a GPU in 16 bits, from its data sheet
    reached: float  # the share of `peak` that large products reach
    memory: float  # GiB of a GPU (2^30 bytes), as nvidia-smi shows them
    reserved: float  # GiB of it that the driver, NCCL and fragmentation take
    inside: float  # GB/s (10^9 bytes a second): what a ring reaches inside a node
    card: float  # Gb/s (10^9 bits a second): the network card that each GPU has
    price: float  # $ an hour for a whole node


@dataclass(frozen=True)
class Layout:
    """How the model is spread."""

    dp: int  # replicas
    tp: int  # ranks that share each layer
    pp: int  # stages of the pipeline
    chunks: int = 1  # v, parts of each stage: 1 is 1F1B, more is interleaved 1F1B
    microbatch: int = 1  # sequences of a microbatch
    sp: bool = False  # sequence parallelism, over the tp ranks
    zero: int = 0  # 1: the optimizer state is sharded over the dp ranks (ZeRO-1); 0: it is not
    recompute: bool = False  # every layer is computed again in backward


class Bill(NamedTuple):
    """What a run costs, and how well it uses what is paid."""

    days: float
    money: float
    mfu: float


# ---------------------------------------------------------------- task 1: time and money


def step(model: Model, machine: Machine, layout: Layout, batch: int) -> dict[str, float]:
    """Task 1: return where the seconds of a step go, {"computing": ..., "recomputing": ...,
    "tensor": ..., "bubble": ..., "data": ...}. Their sum is the time of the step.

    `batch` is the number of sequences of a step, of all replicas together. Each replica gets its
    part and cuts it into m microbatches of `layout.microbatch` sequences. Here all of these divide
    without a remainder, and layers are equal.

    computing : a token takes 6 N + 12 L s h operations, forward and backward together (4 L s h of
        the second term in forward). All GPUs share the work evenly. A GPU reaches `reached` of its
        `peak`.
    recomputing : the forward once more, if `layout.recompute`: a third of all operations. Otherwise
        0.
    tensor : for each microbatch and each layer of the GPU's stage 4 all-reduces of an activation
        along tp, with `recompute` 6. An activation has microbatch * s * h elements of 2 bytes. All
        GPUs wait for them.
    bubble : (p - 1)/(v m) of the ideal time. The ideal time is computing + recomputing + tensor.
    data : one all-reduce along dp of the gradients of the GPU's N/(tp pp) parameters, 2 bytes each.
        It hides behind the backward of the last microbatch: two thirds of computing/m, and all of
        recomputing/m, but no messages. `data` is what is left, at least 0. (ZeRO-1 sends as many
        bytes.)

    All all-reduces are rings: of n bytes on P ranks, 2 (P - 1)/P n bytes pass each link. A group
    that lies within one node has links of `inside`. Any other ring passes through each of its nodes
    once. If k of its ranks are in a node, their k cards carry it together, but never faster than
    `inside`. Sizes are powers of two, so a group that needs no more neighbouring ranks than a node
    has lies within a node. Messages along pp are small: leave them out.
    """
    raise NotImplementedError("task 1 is not started")


def bill(
    model: Model, machine: Machine, batch: int, seconds: float, tokens: float, recompute: bool
) -> Bill:
    """Task 1: return days, money and MFU of a run over `tokens` tokens, whose steps take `seconds`
    each.

    The run has as many steps of `batch` sequences as it needs; the last one counts in full. Days
    and money are those of exactly these steps, not rounded. `machine.price` is that of a whole
    node. A part of a node costs that part of its price: 4 GPUs of a node of 8 cost half of it.

    MFU (model FLOPs utilization): the operations of the model in a step, 6 N + 12 L s h a token,
    over what all GPUs could do at their peak in that time. What is computed again does not count,
    whether `recompute` is true or not.
    """
    raise NotImplementedError("task 1 is not started")


# ---------------------------------------------------------------- task 2: memory


def replicas(machine: Machine, tp: int, pp: int) -> int:
    """Task 2: return how many replicas there are if each has pp stages of tp GPUs, and all GPUs are
    used.

    Nodes do not matter here.

    Raises
    ------
    ValueError
        If the GPUs cannot be divided so.
    """
    raise NotImplementedError("task 2 is not started")


def held(model: Model, layout: Layout, batch: int) -> dict[str, float]:
    """Task 2: return the bytes of a GPU of the first stage, {"parameters": ..., "gradients": ...,
    "optimizer": ..., "activations": ...}.

    parameters : 2 bytes for each of the N/(tp pp) parameters of the GPU.
    gradients : as many, of 2 bytes if a replica has one microbatch. The gradients of several are
        added up in 32 bits, which takes 4 bytes. (What is sent has 2 bytes all the same.)
    optimizer : Adam in mixed precision: a master copy of the weight, momentum and variance, all in
        32 bits. With ZeRO-1 each of the dp ranks holds its part.
    activations : (layers of a stage) * (microbatches under way) * (bytes that a layer keeps)

    With flash attention, a layer keeps s b h (10 + 24/tp) bytes of a microbatch of b sequences.
    Tensor parallelism divides 24 of 34 bytes; 10 stay whole on every rank (the norms, dropouts and
    inputs outside of its regions). With sequence parallelism these 10 are divided by tp, too.

    With `recompute`, a layer keeps only its input: 2 s b h bytes, which only sequence parallelism
    divides by tp. One layer at a time is computed again, for one microbatch: add what this one
    layer keeps without recomputing, less its input, which is counted already.

    Under way on the first stage are p microbatches (1F1B), with v > 1 chunks p + (p - 1)/v, which
    need not be a whole number, and never more than m.
    """
    raise NotImplementedError("task 2 is not started")


def fits(machine: Machine, bytes: Mapping[str, float]) -> bool:
    """Task 2: tell whether a GPU has room for `bytes` (by category, as `held` returns them) beside
    what is reserved.

    What fills the rest of its memory to the last byte fits.
    """
    raise NotImplementedError("task 2 is not started")


# ---------------------------------------------------------------- task 3: the best of many layouts

REASONS = ("", "gpus", "node", "heads", "layers", "batch", "stages", "memory")


def best(
    model: Model, machine: Machine, layouts: Sequence[Layout], batch: int
) -> tuple[int | None, list[str]]:
    """Task 3: return the number of the best layout, counted from 0, and for each layout why it is
    refused.

    The reason is the first of these that is true, and "" if none is:

    "gpus"     dp * tp * pp is not the number of GPUs
    "node"     a tp group has more ranks than a node has GPUs
    "heads"    tp does not divide the heads
    "layers"   the layers cannot be dealt out equally to pp stages of `chunks` parts
    "batch"    the batch cannot be cut into dp equal parts of whole microbatches
    "stages"   there are fewer microbatches than stages
    "memory"   it does not fit

    The best is the one with the fastest step of those that are not refused; of equally fast ones,
    the one whose GPU holds the fewest bytes; of those, the first. It is None (no number) if all are
    refused.
    """
    raise NotImplementedError("task 3 is not started")


# ---------------------------------------------------------------- task 4: a bubble, as measured

REMEDIES = ("nothing", "microbatches", "chunks", "zero bubble", "stages or links")


class Diagnosis(NamedTuple):
    """What is wrong with a pipeline: shares of the whole step, one of `REMEDIES`, and to how
    many.
    """

    measured: float
    formula: float
    remedy: str
    to: int


def diagnose(model: Model, layout: Layout, batch: int, seconds: float, idle: float) -> Diagnosis:
    """Task 4: say whether a pipeline idles too much, whose fault it is, and what helps.

    A step took `seconds`, and a rank was idle for `idle` seconds of it. `measured` is the idle
    share of the step. `formula` is the share of the step that the schedule explains, (p - 1)/(v m +
    p - 1). (Of the ideal time, without the bubble, it is (p - 1)/(v m): a larger number for the
    same bubble.)

    remedy : the first of these whose condition is true
        "nothing"          measured is at most 15 %
        "stages or links"  formula is at most 15 %, or measured is more than 1.5 times formula. Then some stage is
                           slower than the others, or a link is slow, and no other schedule helps
        "microbatches"     with more microbatches formula is at most 15 %. `to` is the smallest such number that cuts a
                           replica's part of the batch into equal microbatches of whole sequences
        "chunks"           with more chunks, and m as it is, formula is at most 15 %. `to` is the smallest such number
                           that deals out the layers equally, to pp stages of so many parts
        "zero bubble"      otherwise
    to : how many there are then, not how many more; 0 for all remedies but "microbatches" and
    "chunks"
    """
    raise NotImplementedError("task 4 is not started")


# ---------------------------------------------------------------- task 5: what the plan does not defend against


@dataclass(frozen=True)
class Plan:
    """How a run is looked after."""

    gpus: int
    hours: float  # that the steps take if nothing happens
    rented: float  # hours for which the cluster is rented
    gpu_mtbf: float  # hours between two failures of one GPU and what belongs to it, on average
    every: float  # hours between two checkpoints; 0: none are written
    kept: int  # how many checkpoints there is room for, the one that is being written among them
    shared: bool  # they are on storage that outlives a node; False: on the nodes' own disks
    restart: float  # hours from a failure until the job computes again
    limit: bool  # a collective that waits for too long ends the job, which is then started again
    by_rank: bool  # somebody compares the ranks' own computing times
    noticed: float  # hours until somebody notices that the loss went wrong; 0: nobody looks


FAILURES = ("dead node", "torn checkpoint", "hang", "slow rank", "bad loss", "late end")


def undefended(plan: Plan) -> set[str]:
    """Task 5: return the failures that a plan does not defend against, a subset of `FAILURES`.

    "dead node"        A node dies with its disks. The run needs a checkpoint elsewhere.
    "torn checkpoint"  The job dies while it writes a checkpoint, and this one is useless. The run needs an earlier one.
                       If `kept` are there, the oldest is deleted *before* the next is written, to
                       make room for it. No node dies here, so any disk will do.
    "hang"             A rank stops without dying, and all others wait for it. Somebody has to end the job, whether or
                       not there are checkpoints.
    "slow rank"        A GPU is throttled, or a link between two stages delivers a tenth: every microbatch waits for it.
                       The time of a step shows that it happened, but not where: all ranks wait.
                       Only the ranks' own computing times name it.
    "bad loss"         The loss goes wrong, and is noticed `noticed` hours later. When it is noticed, the oldest
                       checkpoint that is kept must be at least that old, however the moment lies
                       between two checkpoints. Right after one is written, k kept ones are 0, 1,
                       ..., k - 1 intervals old. Again any disk will do.
    "late end"         The run is expected to take longer than the cluster is rented. Expected are hours / M failures,
                       where M is the mean time between two failures of the whole cluster: any GPU
                       can be the one that fails. (An expected number need not be whole, and may be
                       less than 1.) Each costs `restart`, and the work that is lost: half an
                       interval if checkpoints survive a dead node, half of all `hours` if they do
                       not, or if there are none.
    """
    raise NotImplementedError("task 5 is not started")


# ---------------------------------------------------------------- try it

H100 = Machine(
    gpus=64,
    node=8,
    peak=989e12,
    reached=0.6,
    memory=79.6,
    reserved=7.6,
    inside=365,
    card=400,
    price=8 * 2.49,
)
LLAMA = Model(parameters=70.6e9, layers=80, hidden=8192, heads=64, sequence=4096)
TEAM = Layout(dp=8, tp=4, pp=2)
"""What a team proposes for 70 billion parameters on 64 H100."""


def main() -> None:
    """Try every task, and print what comes out."""
    comm = minidist.init()

    def task_1() -> str:
        parts = step(LLAMA, H100, TEAM, 1024)
        cost = bill(LLAMA, H100, 1024, sum(parts.values()), 1.4e12, False)
        return (
            f"{sum(parts.values()):.2f} s a step, {cost.days:.1f} days, {cost.money:,.0f} $, MFU "
            f"{cost.mfu:.1%}"
        )

    def task_2() -> str:
        bytes = held(LLAMA, TEAM, 1024)
        shown = ", ".join(f"{name} {each / 1e9:.1f} GB" for name, each in bytes.items())
        return (
            f"{replicas(H100, 4, 2)} replicas; {shown}: "
            f"{'it fits' if fits(H100, bytes) else 'it does not fit'}"
        )

    def task_3() -> str:
        some = [
            TEAM,
            Layout(8, 4, 2, zero=1),
            Layout(8, 4, 2, zero=1, sp=True),
            Layout(4, 4, 4, zero=1, sp=True),
        ]
        return str(best(LLAMA, H100, some, 1024))

    def task_4() -> str:
        return str(
            diagnose(LLAMA, Layout(dp=16, tp=1, pp=4, microbatch=8), 1024, seconds=10.0, idle=3.0)
        )

    def task_5() -> str:
        plan = Plan(64, 5500, 5600, 50_700, 12, 1, True, 0.5, limit=True, by_rank=False, noticed=6)
        return str(sorted(undefended(plan)))

    for number, task in enumerate((task_1, task_2, task_3, task_4, task_5), start=1):
        try:
            outcome = task()
        except NotImplementedError as error:
            outcome = str(error)
        if comm.rank == 0:
            print(f"task {number}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
