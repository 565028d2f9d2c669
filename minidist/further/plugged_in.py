"""All strategies, those of few people among them: in one order, and with one set of options."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from torch import nn

from minidist.full import apply
from minidist.full.recipe import Recipe as CommonRecipe
from minidist.full.strategy import Strategy
from minidist.full.trainer.config import Config as CommonConfig
from minidist.full.trainer.config import Groups
from minidist.full.trainer.flags import parse_with_notes
from minidist.full.trainer.options import RunOptions as CommonRun
from minidist.full.trainer.options import SpreadOptions as CommonSpread
from minidist.further.compress.options import CompressionOptions, compressor_of
from minidist.further.muon.muon import SlicedMuon
from minidist.further.muon.muon_with_adamw import MuonWithAdamW, muon_groups
from minidist.further.muon.options import MuonOptions, faults_of
from minidist.further.nf4.options import QLoRAOptions
from minidist.further.nf4.qlora import add_qlora
from minidist.further.nf4.strategy import QuantizedAdapters
from minidist.further.sharded_optimizer import ShardedOptimizer
from minidist.further.sparse_step.options import SparseSiteOptions
from minidist.further.sparse_step.strategy import SparseSites
from minidist.further.zero_plus_plus.options import ZeROPlusPlusOptions
from minidist.further.zero_plus_plus.strategy import QuantizedDataAxis
from minidist.further.zero_plus_plus.zero_plus_plus import ZeROPlusPlus

__all__ = [
    "ORDER",
    "Config",
    "Recipe",
    "RunOptions",
    "ShardedOptimizer",
    "SlicedMuon",
    "SpreadOptions",
    "ZeROPlusPlus",
    "add_qlora",
    "compressor_of",
    "parallelize",
    "parse",
]

EXTENDED: dict[type[Strategy], Strategy] = {
    type(each).__bases__[0]: each
    for each in (QuantizedDataAxis(compressor_of), QuantizedAdapters(), SparseSites())
}
"""What stands in the place of a strategy of `full/`: a subclass of it, with more options."""

ORDER = tuple(EXTENDED.get(type(each), each) for each in apply.ORDER)
"""In which strategies are checked and applied."""


@dataclass(frozen=True)
class Recipe(
    ZeROPlusPlusOptions, CompressionOptions, QLoRAOptions, SparseSiteOptions, CommonRecipe
):
    """A recipe with the options of all strategies."""


@dataclass(frozen=True)
class SpreadOptions(ZeROPlusPlusOptions, CompressionOptions, SparseSiteOptions, CommonSpread):
    """How the work is spread over ranks."""


@dataclass(frozen=True)
class RunOptions(QLoRAOptions, CommonRun):
    """How long, what is written, what is checked."""


@dataclass(frozen=True)
class Config(CommonConfig):
    """A whole run, with the options of all strategies."""

    optimizer: MuonOptions = field(default_factory=MuonOptions)
    parallel: SpreadOptions = field(default_factory=SpreadOptions)
    run: RunOptions = field(default_factory=RunOptions)

    recipe: ClassVar[type[CommonRecipe]] = Recipe
    strategies: ClassVar[Sequence[Strategy]] = ORDER

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if self.optimizer.optimizer == "muon":
            yield from faults_of(self)

    def updater(self, model: nn.Module, groups: Groups) -> tuple[Any, Groups]:
        """Return Muon for the matrices of layers, or what `full/` has."""
        if self.optimizer.optimizer == "muon":
            return MuonWithAdamW, muon_groups(model, groups)
        return super().updater(model, groups)


def parse(argv: Sequence[str], prog: str = "python -m minidist train") -> Config:
    """Return the run that a command line asks for; raises as `parse_with_notes`."""
    return parse_with_notes(argv, Config, prog)[0]


parallelize = partial(apply.parallelize, order=ORDER)
"""What `minidist.full.parallelize` does, with all strategies."""
