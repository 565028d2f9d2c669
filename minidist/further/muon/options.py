"""The option of Muon, and what does not fit it."""

from collections.abc import Iterator
from dataclasses import dataclass

from minidist.full.options import one_of, option
from minidist.full.trainer.config import Config
from minidist.full.trainer.options import OPTIMIZERS, OptimizerOptions


@dataclass(frozen=True)
class MuonOptions(OptimizerOptions):
    """AdamW (Loshchilov & Hutter 2019) or Muon (Jordan et al. 2024), and the learning rate."""

    optimizer: str = option(
        "adamw",
        "what updates the matrices of layers; the rest is AdamW's: adamw, muon",
        one_of(*OPTIMIZERS, "muon"),
    )


def faults_of(config: Config) -> Iterator[str]:
    """Yield a sentence for each option of a run with Muon that does not fit it."""
    if config.memory.offload != "none":
        yield (
            f"--offload {config.memory.offload} updates chunk by chunk, and --optimizer muon needs "
            "whole matrices, which ranks exchange: leave one of them out"
        )
    if config.model.experts:
        yield (
            f"--experts {config.model.experts} are stacks, and --optimizer muon is for single "
            "matrices: leave one of them out"
        )
    if config.adapter_rank:
        yield (
            "--lora and --qlora train two factors of a change, which --optimizer muon would make "
            "orthogonal one by one: leave one of them out"
        )
