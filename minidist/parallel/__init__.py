"""Floor 4: strategies. Each is applied to a serial model from outside; the model's file never changes."""

from minidist.parallel.clip import clip_by_global_norm
from minidist.parallel.data import DDP, DataParallel, NaiveDataParallel, ParameterServer
from minidist.parallel.fsdp import FSDP
from minidist.parallel.parallelize import Parallel, parallelize
from minidist.parallel.placement import Placement, placement_of
from minidist.parallel.recipe import Recipe, RecipeError
from minidist.parallel.sampler import DistributedSampler
from minidist.parallel.sharded_optimizer import ShardedOptimizer
from minidist.parallel.tensor_plan import parallelize_tensor
from minidist.parallel.tensor_styles import ColumnParallel, ParallelRegion, RowParallel, VocabularyParallel
from minidist.parallel.units import MixedPrecision
from minidist.parallel.vocabulary import vocabulary_parallel_cross_entropy_sum
from minidist.parallel.zero import ZeRO1, ZeRO2
from minidist.parallel.zero_plus_plus import ZeROPlusPlus

__all__ = [
    "DDP",
    "FSDP",
    "ColumnParallel",
    "DataParallel",
    "DistributedSampler",
    "MixedPrecision",
    "NaiveDataParallel",
    "Parallel",
    "ParallelRegion",
    "ParameterServer",
    "Placement",
    "Recipe",
    "RecipeError",
    "RowParallel",
    "ShardedOptimizer",
    "VocabularyParallel",
    "ZeRO1",
    "ZeRO2",
    "ZeROPlusPlus",
    "clip_by_global_norm",
    "parallelize",
    "parallelize_tensor",
    "placement_of",
    "vocabulary_parallel_cross_entropy_sum",
]
