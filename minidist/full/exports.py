"""What `minidist.full` exports."""

from minidist.full import adjoint
from minidist.full.adjoint import copy_to, gather_from, reduce_from, scatter_to
from minidist.full.apply import parallelize
from minidist.full.clip import clip_by_global_norm
from minidist.full.ddp.after_backward import NaiveDataParallel, ParameterServer
from minidist.full.ddp.data_parallel import DDP
from minidist.full.ddp.sampler import DistributedSampler
from minidist.full.ddp.strategy import DataParallel
from minidist.full.fsdp.access.methods import register_fsdp_forward_method
from minidist.full.fsdp.fsdp import FSDP
from minidist.full.fsdp.policy import MixedPrecision
from minidist.full.layers.compiled import compile_blocks
from minidist.full.placement import Placement, Slice, placement_of
from minidist.full.recipe import Recipe, RecipeError
from minidist.full.strategy import Parallel
from minidist.full.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
)
from minidist.full.tensor.plan import parallelize_tensor
from minidist.full.tensor.styles import (
    ColumnParallel,
    ParallelRegion,
    RowParallel,
    VocabularyParallel,
)
from minidist.full.tensor.vocabulary import vocabulary_parallel_cross_entropy_sum
from minidist.full.zero.zero import ZeRO1, ZeRO2

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
    "Slice",
    "VocabularyParallel",
    "VocabularyParallelEmbedding",
    "ZeRO1",
    "ZeRO2",
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
