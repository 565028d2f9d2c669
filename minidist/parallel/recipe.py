"""How a model is spread over a mesh, and one table of what can be combined.

    schedule            ZeRO 0 (DDP)   1     2     3
    no pipeline         yes            yes   yes   yes
    gpipe, 1f1b         yes            yes   yes   yes     one stage a rank, whose units are gathered like a model's
    all others          yes            yes   no    no      several stages a rank, or weight gradients put off

Each of these can be combined with tensor and sequence parallelism, recomputation and every
precision of 16 bits or more; `Recipe.supported` also says what goes with adapters, 8 bits and
ZeRO++. ZeRO 2 and 3 keep no whole gradients, so in a pipeline of m microbatches they reduce m
times, and send m times the bytes of ZeRO 0 and 1.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from minidist.mesh import Layout
from minidist.parallel.compiled import compile_fault
from minidist.parallel.data.buckets import MIB
from minidist.parallel.pipeline import NAMES, check, plan
from minidist.parallel.pipeline.actions import Plan

Strategy: TypeAlias = Literal["ddp", "naive", "server"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
RECOMPUTES = 'none, full, selective, sqrt, "every K" (blocks)'
NO_PIPELINE, OWN_PLAN = "no pipeline", "a plan of one's own"
ADAPTERS = ("lora", "qlora")


class RecipeError(ValueError):
    """A combination that is not offered, or does not fit the mesh or the model; the message says
    what does.
    """


@dataclass(frozen=True)
class Recipe:
    """How a model is spread over a mesh.

    An option without effect is refused, unless the reason is that an axis has only one rank.

    Attributes
    ----------
    strategy : {"ddp", "naive", "server"}
        How gradients are reduced over the data axis, if that has several ranks.
    zero : int
        The stage of ZeRO over the data axis, 0 to 3; above 0 with `strategy` "ddp" only.
    shard_ranks : int, optional
        For ZeRO 3: see `FSDP`.
    bucket_bytes : int
        For DDP, ZeRO 1 and ZeRO 2: see `DDP`. ZeRO 3 has units instead.
    sequence : bool
        Sequence parallelism, if there is tensor parallelism.
    schedule : str or Plan
        The schedule of the pipeline, if there is one: its name, or your own plan without sends and
        receives.
    chunks : int
        Stages a rank, for the interleaved schedule.
    microbatches : int
        Microbatches of a step, on each rank of the data axis; without a pipeline, gradients
        accumulate over them. With your own plan, leave this out: the plan has its number.
    recompute : str
        Policy of `recompute` for the layers of each stage. "every K" takes all layers of a stage
        that has fewer.
    compile : bool or str
        Compile each layer's forward, by torch's compiler or this backend of it; see
        `compile_blocks`.
    allocate : callable, optional
        For ZeRO 3: see `FSDP`.
    lora : int
        Train adapters of this rank, and nothing else; see `add_lora`. 0: train the model.
    qlora : bool
        With `lora`: store the matrices beside the adapters in NF4; see `add_qlora`.
    fp8 : bool
        Multiply in 8 bits in the linear layers of the blocks; see `to_fp8`.
    zeropp : bool
        For ZeRO 3: send fewer bytes between nodes; see `ZeROPlusPlus`.
    node_ranks : int, optional
        With `zeropp`: neighbouring ranks of the data axis that form a node; by default those that
        share memory.
    cp_comm, cp_order : str
        How attention reaches the tokens of other ranks, and in which order they lie, if there is
        context parallelism; see `parallelize_context`. The data axis is then dp and cp together.
    ep_comm, ep_fp8 : str, bool
        How tokens travel to experts on other ranks, and whether they do so in 8 bits; see
        `parallelize_experts`.
    """

    strategy: Strategy = "ddp"
    zero: int = 0
    shard_ranks: int | None = None
    bucket_bytes: int = 25 * MIB
    sequence: bool = False
    schedule: str | Plan = "1f1b"
    chunks: int = 1
    microbatches: int = 1
    recompute: str = "none"
    compile: bool | str = False
    allocate: Callable[[int, torch.dtype], Tensor] | None = None
    lora: int = 0
    qlora: bool = False
    fp8: bool = False
    zeropp: bool = False
    node_ranks: int | None = None
    cp_comm: str = "ring"
    cp_order: str = "zigzag"
    ep_comm: str = "direct"
    ep_fp8: bool = False

    supported: ClassVar[Mapping[str, tuple[int | str, ...]]] = {
        name: (0, 1, 2, 3, "cp", "ep", *ADAPTERS, "fp8", "zeropp")
        if name in (NO_PIPELINE, "gpipe", "1f1b")
        else (0, 1, "cp", "ep", *ADAPTERS, *(("fp8",) if name in ("naive", "interleaved") else ()))
        for name in (NO_PIPELINE, *NAMES, OWN_PLAN)
    }
    """What can be combined with each schedule: stages of ZeRO, and options. 8 bits put no weight
    gradients off.
    """

    def plan(self, layout: Layout) -> Plan:
        """Return the checked plan of the pipeline; it names only what is computed.

        Raises
        ------
        RecipeError
            If there is no plan for these numbers of ranks and microbatches, or your own plan has a
            fault.
        """
        try:
            if isinstance(self.schedule, Plan):
                check(self.schedule)
                return self.schedule
            return plan(self.schedule, layout.pp, self.microbatches, self.chunks)
        except ValueError as error:
            raise RecipeError(str(error)) from None

    def check(self, layout: Layout, layers: int) -> Plan | None:
        """Find out, before any work, whether a model with this number of `layers` can be spread
        over a layout.

        Returns
        -------
        Plan or None
            What `plan` returns; None if the layout has no pipeline.

        Raises
        ------
        RecipeError
            It says in one sentence what does not fit, and the fix.
        """
        if fault := next(self._faults(layout, layers), None):
            raise RecipeError(fault)
        if layout.pp == 1:
            return None
        found = self.plan(layout)
        if found.stages > layers:
            fault = (
                f"{found.stages} stages need at least as many layers, but the model has {layers}"
            )
            raise RecipeError(f"{fault}: use fewer ranks in the pipeline, or {found.stages} layers")
        return found

    def _faults(self, layout: Layout, layers: int) -> Iterator[str]:
        """Yield a sentence for each fault. Take only the first: later questions rely on the earlier
        ones.
        """
        own = self.schedule if isinstance(self.schedule, Plan) else None
        if own is None and self.schedule not in NAMES:
            yield f"there is no schedule {self.schedule!r}: choose one of {', '.join(NAMES)}"
        if layers < 1:
            yield from self._faults_without_layers(layout)
        row = NO_PIPELINE if layout.pp == 1 else OWN_PLAN if own else str(self.schedule)
        if self.zero not in self.supported[row]:
            offered = " or ".join(
                str(stage) for stage in self.supported[row] if isinstance(stage, int)
            )
            yield (
                f"ZeRO {self.zero} does not go with {row}: use ZeRO {offered}, or the schedule "
                "gpipe or 1f1b"
            )
        yield from self._faults_of_data_axis(layout.dp * layout.cp)
        yield from self._faults_of_numbers(layout, row)
        if layout.ep > 1 and (
            self.strategy != "ddp" or self.zeropp or self.shard_ranks is not None
        ):
            what = (
                self.strategy
                if self.strategy != "ddp"
                else "ZeRO++"
                if self.zeropp
                else "shard_ranks"
            )
            yield (
                f"ep={layout.ep}: experts have fewer copies than all else, which {what} does not "
                "know: leave it out"
            )
        if self.microbatches < 1:
            yield f"microbatches={self.microbatches}, but a step has at least 1"
        if own and self.microbatches not in (1, own.microbatches):
            yield (
                f"microbatches={self.microbatches}, but the plan has {own.microbatches} of its "
                "own: leave it out"
            )
        if self.chunks != 1 and (own or layout.pp == 1):
            yield f"chunks={self.chunks} is for a pipeline that is interleaved: leave it out"
        if not is_policy(self.recompute):
            yield (
                f"there is no policy {self.recompute!r} of recomputation: choose one of "
                f"{RECOMPUTES}"
            )
        if self.compile and (fault := compile_fault(self.compile)):
            yield fault
        if self.sequence and layout.tp == 1:
            yield (
                "sequence parallelism shares tokens out among the ranks of tensor parallelism: "
                "use tp=2"
            )
        if own and own.ranks != layout.pp:
            yield f"the plan is for {own.ranks} ranks, but pp={layout.pp}: use pp={own.ranks}"
        # asked before planning, which takes a time for each
        if layout.pp > 1 and self.chunks > layers:
            yield f"chunks={self.chunks} on each rank are more than the model has layers: {layers}"

    def _faults_without_layers(self, layout: Layout) -> Iterator[str]:
        """Yield a sentence for each option that is for models with a list of layers."""
        if layout.pp > 1:
            fault = (
                f"pp={layout.pp} cuts a model between the modules of its nn.ModuleList `layers`, "
                "and it has none"
            )
            yield (
                f"{fault}: use pp=1, or a model that has embedding, layers, norm and head, as "
                "minidist.model.GPT has"
            )
        if self.recompute != "none":
            yield f"recompute={self.recompute!r} is for a model with a list of `layers`: use 'none'"
        if self.compile:
            yield f"compile={self.compile!r} is for a model with a list of `layers`: leave it out"

    def _faults_of_data_axis(self, ranks: int) -> Iterator[str]:
        """Yield a sentence for each option that a data axis with this number of `ranks` cannot have
        or does not use.
        """
        if self.strategy not in STRATEGIES:
            yield f"there is no strategy {self.strategy!r}: choose one of {', '.join(STRATEGIES)}"
        if self.zero and self.strategy != "ddp":
            yield (
                f"ZeRO {self.zero} shards what ddp reduces, not strategy {self.strategy!r}: use ddp"
            )
        if self.shard_ranks is not None and self.zero != 3:
            yield (
                f"shard_ranks={self.shard_ranks} is for ZeRO 3, not for ZeRO {self.zero}: leave "
                "it out"
            )
        if self.shard_ranks is not None and (self.shard_ranks < 1 or ranks % self.shard_ranks):
            yield (
                f"shard_ranks={self.shard_ranks} does not divide dp*cp = {ranks}: choose a "
                f"divisor of {ranks}"
            )
        if self.bucket_bytes != Recipe.bucket_bytes and (self.zero == 3 or self.strategy != "ddp"):
            how = "ZeRO 3" if self.zero == 3 else f"the strategy {self.strategy!r}"
            yield (
                f"bucket_bytes={self.bucket_bytes} is for ddp and ZeRO 1 and 2, not for {how}: "
                "leave it out"
            )
        if self.allocate is not None and self.zero != 3:
            yield (
                f"allocate={self.allocate} is for the shards of ZeRO 3, not for ZeRO {self.zero}: "
                "leave it out"
            )
        if self.zeropp and (self.zero != 3 or self.shard_ranks is not None):
            what = f"ZeRO {self.zero}" if self.zero != 3 else f"groups of {self.shard_ranks} ranks"
            yield (
                f"zeropp=True is ZeRO 3 over all ranks of the data axis, not {what}: use zero=3 "
                "alone"
            )
        if self.node_ranks is not None and (
            not self.zeropp or self.node_ranks < 1 or ranks % self.node_ranks
        ):
            yield (
                f"node_ranks={self.node_ranks} is for zeropp=True and a divisor of dp*cp = "
                f"{ranks}: leave it out"
            )

    def _faults_of_numbers(self, layout: Layout, row: str) -> Iterator[str]:
        """Yield a sentence for adapters and numbers of few bits that do not go with the `row` of
        the table.
        """
        for name in (*ADAPTERS, "fp8", "zeropp"):
            if getattr(self, name) and name not in self.supported[row]:
                yield (
                    f"{name}={getattr(self, name)} does not go with {row}: use the schedule gpipe "
                    "or 1f1b"
                )
        if self.lora < 0 or (self.qlora and not self.lora):
            yield (
                f"lora={self.lora} is not the rank of an adapter, with qlora={self.qlora}: use at "
                "least 1, such as 8"
            )
        if self.qlora and layout.tp > 1:
            yield (
                f"qlora=True shares scales out within whole matrices, which tp={layout.tp} cuts: "
                "use lora alone"
            )
        if self.qlora and self.fp8:
            yield (
                "fp8=True multiplies matrices of 16 bits or more, which qlora=True replaces: "
                "leave one of them out"
            )


def is_policy(words: str) -> bool:
    """Tell whether `words` name a policy of recomputation for the layers of a stage."""
    return bool(re.fullmatch(r"none|full|selective|sqrt|every [1-9][0-9]{0,8}", words))
