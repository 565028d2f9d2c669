"""How gradients are compressed, in words: `powersgd:4`, `topk:0.01`, `topk:0.01:0.9`, `1bit`,
`int8`.
"""

from dataclasses import dataclass

from minidist.full.options import AT_LEAST_ONE, FRACTION, Limit, read_number

WAYS = "powersgd:RANK, topk:SHARE, topk:SHARE:MOMENTUM, 1bit or int8"
SHARE = Limit("above 0 and at most 1", lambda value: 0 < value <= 1)


@dataclass(frozen=True)
class Compression:
    """A way to compress gradients, and its numbers.

    Attributes
    ----------
    name : {"powersgd", "topk", "1bit", "int8"}
    columns : int
        Of the factors of `PowerSGD`.
    share, momentum : float
        As for `TopK`.
    """

    name: str
    columns: int = 0
    share: float = 0.0
    momentum: float = 0.0

    @classmethod
    def read(cls, words: str) -> "Compression":
        """Return what `words` say.

        Raises
        ------
        ValueError
            It ends a sentence, such as "must be ...".
        """
        match words.split(":"):
            case ["powersgd", columns]:
                return cls("powersgd", columns=read_number(columns, int, AT_LEAST_ONE))
            case ["topk", share]:
                return cls("topk", share=read_number(share, float, SHARE))
            case ["topk", share, momentum]:
                return cls(
                    "topk",
                    share=read_number(share, float, SHARE),
                    momentum=read_number(momentum, float, FRACTION),
                )
            case ["1bit" | "int8" as name]:
                return cls(name)
        raise ValueError(f"must be {WAYS}")


def keeps_back(words: str) -> bool:
    """Tell whether gradients are kept for later steps."""
    return words not in ("", "int8")


def _is_a_way(words: str) -> bool:
    try:
        Compression.read(words)
    except ValueError:
        return False
    return True


COMPRESSION = Limit(
    f"{WAYS} (as in powersgd:4, topk:0.01, topk:0.01:0.9), or nothing",
    lambda words: not words or _is_a_way(words),
)
