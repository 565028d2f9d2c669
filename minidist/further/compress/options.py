"""The option `compress` with all ways: `powersgd:4`, `topk:0.01`, `topk:0.01:0.9`, `1bit`, `int8`."""

from dataclasses import dataclass

from minidist.full.ddp.compress import compressed
from minidist.full.ddp.compress.compressed import Compressor
from minidist.full.ddp.compress.options import limit_of
from minidist.full.ddp.options import OVERLAPPED
from minidist.full.options import AT_LEAST_ONE, option, read_number
from minidist.further.compress.int8 import Int8
from minidist.further.compress.one_bit import OneBit
from minidist.further.compress.power_sgd import PowerSGD

WAYS = "powersgd:RANK, topk:SHARE, topk:SHARE:MOMENTUM, 1bit or int8"


def compressor_of(words: str) -> Compressor:
    """Return what compresses a bucket's gradients, as a user asks for it.

    Raises
    ------
    ValueError
        It ends a sentence, such as "must be ...".
    """
    match words.split(":"):
        case ["powersgd", said]:
            columns = read_number(said, int, AT_LEAST_ONE)
            return lambda parameters, comm: PowerSGD(parameters, comm, columns)
        case ["topk", *_]:
            return compressed.compressor_of(words)
        case ["1bit"]:
            return lambda parameters, comm: OneBit(parameters, comm.size)
        case ["int8"]:
            return lambda parameters, comm: Int8(parameters, comm.size)
    raise ValueError(f"must be {WAYS}")


@dataclass(frozen=True)
class CompressionOptions:
    """As what gradients travel.

    Attributes
    ----------
    compress : str
        For DDP: a way, and its numbers; see `compressor_of`. Empty: as they are.
    """

    compress: str = option(
        "",
        f"send gradients compressed, and keep what is not sent for later: {WAYS}",
        limit_of(f"{WAYS} (as in powersgd:4, topk:0.01, topk:0.01:0.9)", compressor_of),
        needs=OVERLAPPED,
        exact=False,
    )

    @property
    def keeps_back(self) -> bool:
        """Whether gradients are kept for later steps."""
        return self.compress not in ("", "int8")
