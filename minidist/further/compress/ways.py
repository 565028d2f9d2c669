"""From the words of a way to compress to what compresses."""

from minidist.full.ddp.compress import compressed
from minidist.full.ddp.compress.compressed import Compressor
from minidist.further.compress.int8 import Int8
from minidist.further.compress.one_bit import OneBit
from minidist.further.compress.options import read_way
from minidist.further.compress.power_sgd import PowerSGD


def compressor_of(words: str) -> Compressor:
    """Return what compresses a bucket's gradients, as a user asks for it."""
    name, numbers = read_way(words)
    if name == "powersgd":
        return lambda parameters, comm: PowerSGD(parameters, comm, int(numbers[0]))
    if name == "topk":
        return compressed.compressor_of(words)
    kind = OneBit if name == "1bit" else Int8
    return lambda parameters, comm: kind(parameters, comm.size)
