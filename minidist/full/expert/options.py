"""The options of expert parallelism."""

from dataclasses import dataclass

from minidist.full.options import Needs, one_of, option

WAYS = ("direct", "hierarchical")
EXPERT_RANKS = Needs("--ep RANKS", "ep", lambda ranks: ranks > 1)


@dataclass(frozen=True)
class ExpertParallelOptions:
    """How tokens travel to experts on other ranks; see `parallelize_experts`.

    Attributes
    ----------
    ep_comm : {"direct", "hierarchical"}
    ep_fp8 : bool
        Send tokens to their experts in 8 bits.
    """

    ep_comm: str = option(
        "direct",
        f"how tokens reach experts: {', '.join(WAYS)}",
        one_of(*WAYS),
        needs=EXPERT_RANKS,
    )
    ep_fp8: bool = option(
        False, "with --ep: send tokens to experts in 8 bits", needs=EXPERT_RANKS, exact=False
    )
