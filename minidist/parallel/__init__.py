"""Floor 4: strategies. Each is applied to a serial model from outside; the model's file never changes."""

from minidist.parallel.clip import clip_by_global_norm
from minidist.parallel.data import DDP, DataParallel, NaiveDataParallel, ParameterServer
from minidist.parallel.sampler import DistributedSampler

__all__ = ["DDP", "DataParallel", "DistributedSampler", "NaiveDataParallel", "ParameterServer", "clip_by_global_norm"]
