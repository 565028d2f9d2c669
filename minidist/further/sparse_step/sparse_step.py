"""An outer step in a hundredth of its bytes: the largest elements, in 2 bits, the others later.

    kept      0.95 kept + change, in chunks of 4,096 elements
    sent      of each chunk the 64 largest:    where    12 bits each
                                               what      2 bits: its sign, and whether it is large or small
                                               scales    two float32: the mean of the large, and of the small
    kept      kept - sent

    2 bits and 12 bits for one element in 64: 896 bits a chunk and its 8 bytes of scales,
    136 times fewer than 32 bits an element, and every H steps only

What is kept forgets slowly, as a momentum does: it takes the place of the outer momentum. Sites
choose different elements, so each gets what all have sent. (Sarfi et al. 2025, SparseLoCo,
algorithm 1, whose decay and chunk these are.)

Cost: a rank sends (P - 1) times the bytes of `sent`. Memory: what is kept, n bytes.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from minidist.full.collectives import all_gather
from minidist.full.comm import Communicator

CHUNK = 4096  # elements, whose places take 12 bits
DECAY = 0.95


class SparseStep:
    """What an outer step travels as.

    Parameters
    ----------
    like : Tensor
        Flat; a step has its size.
    share : float
        Of the elements of each chunk that is sent: a multiple of four elements, and at least four.
    """

    def __init__(self, like: Tensor, share: float) -> None:
        self.error = torch.zeros_like(like)
        self.kept = {"outer error": self.error}
        self.chunks = -(-len(like) // CHUNK)
        self.count = min(CHUNK, max(4, 4 * round(share * CHUNK / 4)))

        sent = self.chunks * self.count
        places = sent * 12 // 8
        codes = sent * 2 // 8
        self.lengths = [places, codes, self.chunks * 8]

    def bytes(self, sites: int) -> float:
        """Return what a rank sends to all others: places, values and scales."""
        return (sites - 1) * sum(self.lengths)

    def reduce(self, change: Tensor, comm: Communicator) -> None:
        """Replace this site's change by the mean of what all sites have sent. Collective."""
        kept = DECAY * self.error + change
        mine = self._pack(kept)
        self.error.copy_(kept)
        self.error -= self._unpack(mine, kept)
        row_each = [1] * comm.size
        rows = all_gather(mine[None], comm, counts=row_each)
        change.zero_()
        for row in rows:  # in the order of sites: the same bits on each
            change += self._unpack(row, change)
        change /= comm.size

    def _pack(self, kept: Tensor) -> Tensor:
        """Return what is sent of `kept`, as bytes."""
        missing = self.chunks * CHUNK - len(kept)
        padded = pad(kept, (0, missing))
        rows = padded.view(self.chunks, CHUNK)
        sizes = rows.abs()
        largest = sizes.topk(self.count, sorted=False)
        places = largest.indices  # [chunks, count]
        values = rows.gather(1, places).float()
        sizes = values.abs()
        mean = sizes.mean(1, keepdim=True)
        large = sizes > mean
        small_ones = mean_of(sizes, ~large)
        large_ones = mean_of(sizes, large)
        scales = torch.stack([small_ones, large_ones], dim=1)  # [chunks, 2]
        negative = values < 0
        codes = 2 * large.to(torch.uint8) + negative
        packed_places = pack_places(places)
        packed_codes = pack_codes(codes)
        scale_bytes = scales.view(torch.uint8).flatten()
        return torch.cat([packed_places, packed_codes, scale_bytes])

    def _unpack(self, sent: Tensor, like: Tensor) -> Tensor:
        """Return what a site has sent, with zeros where it has sent nothing; it is like `like`."""
        shape = self.chunks, self.count
        parts = torch.split(sent, self.lengths)
        places = unpack_places(parts[0]).view(shape)
        codes = unpack_codes(parts[1]).view(shape)
        # a copy, as memory has to be aligned to be read as other numbers
        scales = parts[2].clone().view(torch.float32)
        levels = scales.view(self.chunks, 2)
        large = codes >> 1
        negative = codes & 1
        sizes = levels.gather(1, large.long())
        signs = 1 - 2 * negative.float()
        values = sizes * signs
        rows = like.new_zeros(self.chunks, CHUNK)
        rows.scatter_(1, places, values.to(like.dtype))
        flat = rows.flatten()
        return flat[: len(like)]


def mean_of(sizes: Tensor, chosen: Tensor) -> Tensor:
    """Return the mean of the chosen elements of each row; 0 if there are none."""
    total = (sizes * chosen).sum(1)
    count = chosen.sum(1).clamp(min=1)
    return total / count


def pack_places(places: Tensor) -> Tensor:
    """Return numbers below 4,096, an even number of them, in 12 bits each: two in three bytes."""
    pairs = places.flatten().view(-1, 2)
    first, second = pairs.unbind(1)
    low = first & 255
    upper = first >> 8
    lower = second & 15
    middle = upper + lower * 16
    high = second >> 4
    three = torch.stack([low, middle, high], dim=1)
    return three.to(torch.uint8).flatten()


def unpack_places(packed: Tensor) -> Tensor:
    """Return the numbers that `pack_places` has packed."""
    three = packed.long().view(-1, 3)
    low, middle, high = three.unbind(1)
    upper = middle & 15
    lower = middle >> 4
    first = low + upper * 256
    second = lower + high * 16
    pairs = torch.stack([first, second], dim=1)
    return pairs.flatten()


def pack_codes(codes: Tensor) -> Tensor:
    """Return numbers below 4, a multiple of four of them, in 2 bits each."""
    four = codes.flatten().view(-1, 4)
    weights = torch.tensor([1, 4, 16, 64], dtype=torch.uint8, device=codes.device)
    return (four * weights).sum(1, dtype=torch.uint8)


def unpack_codes(packed: Tensor) -> Tensor:
    """Return the numbers that `pack_codes` has packed."""
    four = [(packed >> shift) & 3 for shift in (0, 2, 4, 6)]
    return torch.stack(four, dim=1).flatten()
