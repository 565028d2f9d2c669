"""The options of what a rank does with its own layers, by itself."""

import re
from dataclasses import dataclass

from minidist.full.options import NOT_NEGATIVE, Limit, Needs, option

RECOMPUTES = 'none, full, selective, sqrt, "every K" (blocks)'
FOLDER = Needs("--init FOLDER", "init", bool)


def is_policy(words: str) -> bool:
    """Tell whether `words` name a policy of recomputation for the layers of a stage."""
    return bool(re.fullmatch(r"none|full|selective|sqrt|every [1-9][0-9]{0,8}", words))


POLICY = Limit(f"one of {RECOMPUTES}", is_policy)


@dataclass(frozen=True)
class AdapterOptions:
    """Adapters, which are trained in place of the model.

    Attributes
    ----------
    lora : int
        Train adapters of this rank, and nothing else; see `add_lora`. 0: train the model.
    """

    lora: int = option(
        0,
        "with --init: train adapters of this rank, and nothing else; 0: none",
        NOT_NEGATIVE,
        needs=FOLDER,
    )

    @property
    def adapter_rank(self) -> int:
        """Rank of the adapters; 0: none."""
        return self.lora


@dataclass(frozen=True)
class Float8Options:
    """Products in 8 bits.

    Attributes
    ----------
    fp8 : bool
        Multiply in 8 bits in the linear layers of the blocks, and in experts; see `to_fp8`. On the command line
        this is a precision.
    """

    fp8: bool = option(False, "multiply in 8 bits", flag=False)


@dataclass(frozen=True)
class AutocastOptions:
    """torch's autocast.

    Attributes
    ----------
    autocast : str
        The dtype of products, bfloat16 or float16, while parameters stay in float32; see
        `Autocast`. On the command line this is a precision. Empty: none.
    """

    autocast: str = option("", "the dtype of products under autocast", flag=False)


@dataclass(frozen=True)
class RecomputeOptions:
    """What backward computes again.

    Attributes
    ----------
    recompute : str
        Policy of `recompute` for the layers of each stage. "every K" takes all layers of a stage
        that has fewer.
    """

    recompute: str = option("none", f"what backward computes again: {RECOMPUTES}", POLICY)


@dataclass(frozen=True)
class CompileOptions:
    """What a compiler makes faster.

    Attributes
    ----------
    compile : bool or str
        Compile each layer's forward, by torch's compiler or this backend of it; see
        `compile_blocks`.
    """

    compile: bool | str = option(
        False, "compile each block's forward, and the loss, by torch.compile", kind=bool
    )
