"""How gradients are compressed, in words: `topk:0.01`, `topk:0.01:0.9`."""

from collections.abc import Callable
from typing import Any

from minidist.full.options import FRACTION, Limit, read_number

WAYS = "topk:SHARE or topk:SHARE:MOMENTUM"
SHARE = Limit("above 0 and at most 1", lambda value: 0 < value <= 1)


def read_share(words: str) -> tuple[float, float]:
    """Return share and momentum, as `TopK` takes them.

    Raises
    ------
    ValueError
        It ends a sentence, such as "must be ...".
    """
    match words.split(":"):
        case ["topk", share]:
            return read_number(share, float, SHARE), 0.0
        case ["topk", share, momentum]:
            return read_number(share, float, SHARE), read_number(momentum, float, FRACTION)
    raise ValueError(f"must be {WAYS}")


def limit_of(ways: str, read: Callable[[str], Any]) -> Limit:
    """Limit an option to nothing, and to words that `read` can read."""

    def holds(words: str) -> bool:
        try:
            return not words or bool(read(words))
        except ValueError:
            return False

    return Limit(f"{ways}, or nothing", holds)


COMPRESSION = limit_of(f"{WAYS} (as in topk:0.01, topk:0.01:0.9)", read_share)
