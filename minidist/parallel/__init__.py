"""Floor 4: strategies. Each is applied to a serial model from outside; the model's file never changes.

The differentiable collectives, for layers of one's own, are in `adjoint`; the four of Megatron are here as well.
"""

from minidist.parallel import adjoint
from minidist.parallel.adjoint import copy_to, gather_from, reduce_from, scatter_to
from minidist.parallel.clip import clip_by_global_norm
from minidist.parallel.data import DDP, DataParallel, NaiveDataParallel, ParameterServer
from minidist.parallel.fsdp import FSDP
from minidist.parallel.parallelize import Parallel, parallelize
from minidist.parallel.placement import Placement, placement_of
from minidist.parallel.recipe import Recipe, RecipeError
from minidist.parallel.sampler import DistributedSampler
from minidist.parallel.sharded_optimizer import ShardedOptimizer
from minidist.parallel.tensor_layers import ColumnParallelLinear, RowParallelLinear, VocabularyParallelEmbedding
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
    "ColumnParallelLinear",
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
    "RowParallelLinear",
    "ShardedOptimizer",
    "VocabularyParallel",
    "VocabularyParallelEmbedding",
    "ZeRO1",
    "ZeRO2",
    "ZeROPlusPlus",
    "adjoint",
    "clip_by_global_norm",
    "copy_to",
    "gather_from",
    "parallelize",
    "parallelize_tensor",
    "placement_of",
    "reduce_from",
    "scatter_to",
    "vocabulary_parallel_cross_entropy_sum",
]
