"""The options of context parallelism; `--cp` itself is one of `full/trainer/options.py`."""

from dataclasses import dataclass

from minidist.full.options import Needs, one_of, option

WAYS = ("ring", "all_gather", "ulysses")
ORDERS = ("zigzag", "contiguous", "striped")
CONTEXT_RANKS = Needs("--cp RANKS", "cp", lambda ranks: ranks > 1)


@dataclass(frozen=True)
class ContextParallelOptions:
    """How attention reaches the tokens of other ranks; see `parallelize_context`.

    The data axis is then dp and cp together.

    Attributes
    ----------
    cp_comm : {"ring", "all_gather", "ulysses"}
    cp_order : {"zigzag", "contiguous", "striped"}
        Which tokens of a sequence a rank has.
    """

    cp_comm: str = option(
        "ring",
        f"how attention reaches all tokens: {', '.join(WAYS)}",
        one_of(*WAYS),
        needs=CONTEXT_RANKS,
    )
    cp_order: str = option(
        "zigzag",
        f"which tokens a rank has: {', '.join(ORDERS)}",
        one_of(*ORDERS),
        needs=CONTEXT_RANKS,
    )
