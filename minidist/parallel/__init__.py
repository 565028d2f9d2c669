"""Floor 4: strategies. Each is applied to a serial model from outside; the model's file never changes."""

from minidist.parallel.clip import clip_by_global_norm
from minidist.parallel.data import DDP, DataParallel, NaiveDataParallel, ParameterServer
from minidist.parallel.fsdp import FSDP
from minidist.parallel.placement import Placement, placement_of
from minidist.parallel.sampler import DistributedSampler
from minidist.parallel.units import MixedPrecision
from minidist.parallel.zero import ZeRO1, ZeRO2
from minidist.parallel.zero_plus_plus import ZeROPlusPlus

__all__ = [
    "DDP",
    "FSDP",
    "DataParallel",
    "DistributedSampler",
    "MixedPrecision",
    "NaiveDataParallel",
    "ParameterServer",
    "Placement",
    "ZeRO1",
    "ZeRO2",
    "ZeROPlusPlus",
    "clip_by_global_norm",
    "placement_of",
]
