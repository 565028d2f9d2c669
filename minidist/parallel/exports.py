"""What `minidist.parallel` exports."""

from minidist.parallel import adjoint
from minidist.parallel.adjoint import copy_to, gather_from, reduce_from, scatter_to
from minidist.parallel.apply import parallelize
from minidist.parallel.clip import clip_by_global_norm
from minidist.parallel.data.after_backward import NaiveDataParallel, ParameterServer
from minidist.parallel.data.data_parallel import DDP
from minidist.parallel.data.sampler import DistributedSampler
from minidist.parallel.data.strategy import DataParallel
from minidist.parallel.layers.compiled import compile_blocks
from minidist.parallel.placement import Placement, Slice, placement_of
from minidist.parallel.recipe import Recipe, RecipeError
from minidist.parallel.sharded.access.methods import register_fsdp_forward_method
from minidist.parallel.sharded.fsdp import FSDP
from minidist.parallel.sharded.policy import MixedPrecision
from minidist.parallel.sharded.sharded_optimizer import ShardedOptimizer
from minidist.parallel.sharded.zero import ZeRO1, ZeRO2
from minidist.parallel.sharded.zero_plus_plus import ZeROPlusPlus
from minidist.parallel.strategy import Parallel
from minidist.parallel.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
)
from minidist.parallel.tensor.plan import parallelize_tensor
from minidist.parallel.tensor.styles import (
    ColumnParallel,
    ParallelRegion,
    RowParallel,
    VocabularyParallel,
)
from minidist.parallel.tensor.vocabulary import vocabulary_parallel_cross_entropy_sum

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
    "Slice",
    "VocabularyParallel",
    "VocabularyParallelEmbedding",
    "ZeRO1",
    "ZeRO2",
    "ZeROPlusPlus",
    "adjoint",
    "clip_by_global_norm",
    "compile_blocks",
    "copy_to",
    "gather_from",
    "parallelize",
    "parallelize_tensor",
    "placement_of",
    "reduce_from",
    "register_fsdp_forward_method",
    "scatter_to",
    "vocabulary_parallel_cross_entropy_sum",
]
