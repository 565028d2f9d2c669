"""The option `compress` with all ways: `powersgd:4`, `topk:0.01`, `topk:0.01:0.9`, `1bit`, `int8`."""

from dataclasses import dataclass

from minidist.full.ddp.compress.options import limit_of, read_share
from minidist.full.ddp.options import OVERLAPPED
from minidist.full.options import AT_LEAST_ONE, option, read_number

WAYS = "powersgd:RANK, topk:SHARE, topk:SHARE:MOMENTUM, 1bit or int8"


def read_way(words: str) -> tuple[str, tuple[float, ...]]:
    """Return the name of a way to compress, and its numbers.

    Raises
    ------
    ValueError
        It ends a sentence, such as "must be ...".
    """
    match words.split(":"):
        case ["powersgd", columns]:
            return "powersgd", (read_number(columns, int, AT_LEAST_ONE),)
        case ["topk", *_]:
            return "topk", read_share(words)
        case ["1bit" | "int8" as name]:
            return name, ()
    raise ValueError(f"must be {WAYS}")


@dataclass(frozen=True)
class CompressionOptions:
    """As what gradients travel.

    Attributes
    ----------
    compress : str
        For DDP: a way, and its numbers; see `read_way`. Empty: as they are.
    """

    compress: str = option(
        "",
        f"send gradients compressed, and keep what is not sent for later: {WAYS}",
        limit_of(f"{WAYS} (as in powersgd:4, topk:0.01, topk:0.01:0.9)", read_way),
        needs=OVERLAPPED,
        exact=False,
    )

    @property
    def keeps_back(self) -> bool:
        """Whether gradients are kept for later steps."""
        return self.compress not in ("", "int8")
