"""Dropout with a mask that depends only on where an element is, not on when it is computed.

    seed ─▶ step ─▶ site ─▶ row ─▶ position ─▶ channel          each arrow is one `child`
                            └──── global ────┘                  keep = the last one ≥ rate

Ordinary dropout draws from a stream of random numbers, so the mask depends on everything drawn
before. A rank that holds only some rows, positions or layers would draw another mask than the
serial program, and a recomputed forward would have to restore the state of the stream. Here every
element of the *serial* activation has an address, and a hash of the address gives its random bits.
Every rank that holds the element computes the same bits. Nothing is stored, communicated or
restored.

The hash is that of SplitMix64. Output i of a generator is a mixing function of
`key + (i + 1) * GOLDEN`, so it needs no earlier output. A tree of such generators gives each token
a key, and each channel of the token one output. (Steele, Lea & Flood 2014, "Fast splittable
pseudorandom number generators". Counters instead of state: Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3".)

Cost: about a dozen integer operations and 16 temporary bytes per element; autograd saves the mask,
1 byte per element.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

# The constants of SplitMix64, as the signed integers that torch multiplies modulo 2**64.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
MULTIPLIER_2 = 0x94D049BB133111EB - 2**64


@dataclass(frozen=True)
class Where:
    """The part of the serial run that a forward pass computes.

    Attributes
    ----------
    seed, step : int
        Seed of the run, and number of the optimizer step. Both in [0, 2**63).
    rows : int or Tensor
        Row of the first sequence within the step's global batch; or, for rows that are not
        neighbours, an int64 tensor [B] with the row of each.
    positions : int or Tensor
        Position of the first token in its whole sequence; or an int64 tensor [T] with the position
        of each.
    documents : Tensor, optional
        Where the document of each token begins, int64 [B, T] on the CPU, for *all* T positions of
        the whole sequences. A token then attends to its own document alone, and is rotated by its
        position there. Dropout goes by `positions`, which no two tokens of a row share.
    weight : float
        What the loss of a token is multiplied by before losses are summed: a layer's own losses get
        the same factor.
    """

    seed: int = 0
    step: int = 0
    rows: int | Tensor = 0
    positions: int | Tensor = 0
    weight: float = 1.0
    documents: Tensor | None = None

    def row_numbers(self, count: int, device: torch.device) -> Tensor:
        """Return the global rows of this rank's `count` sequences, int64 [B]."""
        return _numbers("rows", self.rows, count, device)

    def position_numbers(self, count: int, device: torch.device) -> Tensor:
        """Return the global positions of this rank's `count` tokens, int64 [T]."""
        return _numbers("positions", self.positions, count, device)

    def in_document(self, positions: Tensor) -> Tensor:
        """Return where tokens at these positions [T] are in their documents: [B, 1, T], for all
        heads alike; without documents the positions themselves.
        """
        if self.documents is None:
            return positions
        begin = self.documents[:, positions.cpu()].to(positions.device)
        return (positions - begin).unsqueeze(1)


ORIGIN = Where()


class Dropout(nn.Module):
    """Zero each element with probability `rate` and scale the others by 1/(1 - rate) (Srivastava et
    al. 2014).

    Parameters
    ----------
    rate : float
        Probability of zero, in [0, 1). At 0, and in evaluation, the input is returned.
    site : int
        Number of this dropout in the model; every site has its own masks.

    Raises
    ------
    ValueError
        If the rate is no such probability: elements would be scaled by something else.
    """

    def __init__(self, rate: float, site: int) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"rate={rate} is not a probability in [0, 1): use 0 for none.")
        self.rate, self.site = rate, site

    def forward(self, x: Tensor, where: Where) -> Tensor:
        """Drop elements of `x` [B, T, D]. `where` gives its rows and positions; all D channels must
        be present.
        """
        if not self.training or self.rate == 0:
            return x
        return x.masked_fill(dropout_mask(x.shape, self.rate, self.site, where, x.device), 0) * (
            1 / (1 - self.rate)
        )


def dropout_mask(
    shape: torch.Size, rate: float, site: int, where: Where, device: torch.device
) -> Tensor:
    """Return a boolean [B, T, D], true where an element is dropped: the slice of the serial mask at
    `where`.
    """
    batch, time, channels = shape
    key = torch.tensor(0)
    for number in (where.seed, where.step, site):
        key = child(key, torch.tensor(number))
    row_key = child(key, where.row_numbers(batch, device))  # [B]
    token_key = child(row_key[:, None], where.position_numbers(time, device))  # [B, T]
    bits = child(token_key[..., None], torch.arange(channels, device=device))  # [B, T, D]
    # The bits are uniform over the signed 64-bit integers, and a fraction `rate` of these lies
    # below this bound.
    return bits < round(rate * 2**64) - 2**63


def child(key: Tensor, index: Tensor) -> Tensor:
    """Return output number `index` of the SplitMix64 generator `key`: 64 uniform bits, which may
    serve as a key.

    Both are int64, and broadcast. Torch's int64 arithmetic is modulo 2**64, as the hash needs.
    """
    # a new tensor, so the next lines work in place: several times faster
    bits = key + (index + 1) * GOLDEN
    bits.bitwise_xor_(_shift_right(bits, 30)).mul_(MULTIPLIER_1)
    bits.bitwise_xor_(_shift_right(bits, 27)).mul_(MULTIPLIER_2)
    return bits.bitwise_xor_(_shift_right(bits, 31))


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift in zeros from the left, where `>>` on a signed integer would repeat the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _numbers(name: str, first: int | Tensor, count: int, device: torch.device) -> Tensor:
    """Return `count` numbers from `first` on, or those that the tensor `first` lists."""
    if isinstance(first, int):
        return torch.arange(first, first + count, device=device)
    if first.shape != (count,):
        fault = (
            f"Where.{name} has shape {tuple(first.shape)}, but the batch at hand has {count} {name}"
        )
        raise ValueError(
            f"{fault}: give an int64 tensor of shape ({count},), or the first number alone."
        )
    return first.to(device)
