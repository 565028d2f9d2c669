"""How gradients are compressed, in words: `powersgd:4`."""

from dataclasses import dataclass

from minidist.options import AT_LEAST_ONE, Limit, read_number


@dataclass(frozen=True)
class Compression:
    """A way to compress gradients, and its number.

    Attributes
    ----------
    name : {"powersgd"}
    argument : int
        Columns of the factors.
    """

    name: str
    argument: int

    @classmethod
    def read(cls, words: str) -> "Compression":
        """Return what `words` say.

        Raises
        ------
        ValueError
            It ends a sentence, such as "must be ...".
        """
        name, _, argument = words.partition(":")
        if name != "powersgd":
            raise ValueError(f"must be {WAYS}")
        return cls(name, read_number(argument, int, AT_LEAST_ONE))


WAYS = "powersgd:RANK, as in powersgd:4"


def _is_a_way(words: str) -> bool:
    try:
        Compression.read(words)
    except ValueError:
        return False
    return True


COMPRESSION = Limit(f"{WAYS}, or nothing", lambda words: not words or _is_a_way(words))
