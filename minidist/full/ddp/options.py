"""The options of what is done over the data axis: data parallelism, and ZeRO."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from minidist.full.ddp.compress.options import COMPRESSION, WAYS
from minidist.full.options import NOT_NEGATIVE, Limit, Needs, one_of, option

Strategy: TypeAlias = Literal["ddp", "naive", "server"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
BUCKET_MIB = 25.0
BUCKET = Limit("above 0 and at most 1e9", lambda value: 0 < value <= 1e9)
OVERLAPPED = Needs("--strategy ddp", "strategy", lambda name: name == "ddp")
STAGE = Limit("0, 1, 2 or 3", lambda stage: 0 <= stage <= 3)
ZERO_3 = Needs("--zero 3", "zero", lambda stage: stage == 3)


@dataclass(frozen=True)
class DataParallelOptions:
    """How gradients are reduced over the data axis.

    Attributes
    ----------
    strategy : {"ddp", "naive", "server"}
        What reduces them, if the data axis has several ranks.
    bucket_mib : float
        MiB of a bucket of gradients, for DDP, ZeRO 1 and ZeRO 2: see `DDP`. ZeRO 3 has units
        instead.
    compress : str
        For DDP: as what the gradients of a bucket travel; see `CompressedDDP`. Empty: as they are.
    """

    strategy: Strategy = option(
        "ddp",
        f"how gradients are reduced: {', '.join(STRATEGIES)}",
        one_of(*STRATEGIES),
        kind=str,
    )
    bucket_mib: float = option(
        BUCKET_MIB, "MiB of a gradient bucket (ddp, and --zero 1 and 2)", BUCKET, needs=OVERLAPPED
    )
    compress: str = option(
        "",
        f"send gradients compressed, and keep what is not sent for later: {WAYS}",
        COMPRESSION,
        needs=OVERLAPPED,
        exact=False,
    )

    @property
    def keeps_back(self) -> bool:
        """Whether gradients are kept for later steps."""
        return bool(self.compress)


@dataclass(frozen=True)
class ShardingOptions:
    """What is sharded over the data axis, if that has several ranks.

    Attributes
    ----------
    zero : int
        The stage of ZeRO, 0 to 3.
    hsdp : int
        For ZeRO 3: ranks in a group that shares parameters out, other groups have copies; see
        `FSDP`. 0: all ranks of the data axis.
    allocate : callable, optional
        For ZeRO 3: what allocates shards; see `FSDP`.
    """

    zero: int = option(
        0,
        "ZeRO: shard the optimizer's state (1), and gradients (2), and parameters (3)",
        STAGE,
        needs=OVERLAPPED,
    )
    hsdp: int = option(
        0,
        "with --zero 3: ranks in a group that shares parameters out; 0: all",
        NOT_NEGATIVE,
        needs=ZERO_3,
    )
    allocate: Callable[[int, Any], Any] | None = option(
        None, "what allocates the memory of a shard", flag=False
    )
