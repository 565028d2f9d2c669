"""Floor 4: strategies. Each is applied to a serial model from outside; the model's file never
changes.

Read `data/` (DDP), `sharded/` (ZeRO 1 to 3) with `optimizer/`, `tensor/` with `adjoint.py`,
`context/`, then `pipeline/`. All share three files: `placement.py` records which elements of a
parameter a rank has, `gradient.py` has what is asked of all of a gradient answered by all ranks, so
that torch's own clipping and scaling stay right, and `replica.py` says what is asked of any
strategy over the data axis. The files that join them come last: `recipe.py` says what can be
combined, `parallelize.py` applies it, in one order (some steps are in `steps.py`), `clip.py` clips
gradients, and `compiled.py` compiles blocks. `freed.py` is what a parameter without memory says to
its reader. `meta.py` is for models that are too large to be built.

`adjoint` has the differentiable collectives, for layers of your own; Megatron's four are exported
here as well.
"""

from minidist.parallel import adjoint
from minidist.parallel.adjoint import copy_to, gather_from, reduce_from, scatter_to
from minidist.parallel.clip import clip_by_global_norm
from minidist.parallel.compiled import compile_blocks
from minidist.parallel.data.data_parallel import DDP
from minidist.parallel.data.plain import NaiveDataParallel, ParameterServer
from minidist.parallel.data.sampler import DistributedSampler
from minidist.parallel.data.strategy import DataParallel
from minidist.parallel.parallelize import Parallel, parallelize
from minidist.parallel.placement import Placement, placement_of
from minidist.parallel.recipe import Recipe, RecipeError
from minidist.parallel.sharded.fsdp import FSDP
from minidist.parallel.sharded.methods import register_fsdp_forward_method
from minidist.parallel.sharded.sharded_optimizer import ShardedOptimizer
from minidist.parallel.sharded.units import MixedPrecision
from minidist.parallel.sharded.zero import ZeRO1, ZeRO2
from minidist.parallel.sharded.zero_plus_plus import ZeROPlusPlus
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
