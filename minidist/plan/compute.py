"""How long a device computes: products by tiles and waves, attention by its kernel, the rest by its
bytes.

    product     tiles of the result are dealt out to the device's processors, a wave of them at a time; the last wave
                is as long as a full one. Never faster than its bytes can be read.
    attention   a fused kernel at its share of the peak, or products of scores and what is read between them
    the rest    bytes / (bandwidth x `streamed`)

A device with one unit, a core, has no waves to fill: its products take 2 m n k operations.

(Waves and tiles: NVIDIA, Matrix multiplication background, 2023. Rooflines: Williams et al. 2009.)
"""

import math
from dataclasses import dataclass
from functools import cache

from minidist.plan.device import Constants, Device
from minidist.plan.model import Model, Product

TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.97),
    (128, 64, 0.85),
    (64, 128, 0.85),
    (64, 64, 0.7),
)
"""Rows, columns, and how well such a tile uses a processor beside the largest."""

SPLITS = (1, 2, 4, 8)  # of the inner dim, where there are fewer tiles than processors
START = 96  # columns of k that a tile takes to fill and drain its pipeline


@dataclass(frozen=True)
class Share:
    """What one rank computes of a layer: `batch` sequences, 1/cp of the tokens, 1/tp of the heads
    and channels.

    `kernel` of attention: "unfused" (scores are written and read, all of them), "triton" or "flash"
    (the causal half). `bits8` is the speed of 8-bit products beside the data sheet's, 0 for 16
    bits. An element has `width` bytes, and element-wise work moves `passes` times the bytes of
    fused kernels.
    """

    device: Device
    known: Constants
    model: Model
    kernel: str
    batch: int
    sequence: int
    tp: int
    cp: int
    ep: int
    sp: bool
    bits8: float
    width: int = 2
    passes: float = 1.0

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on this rank."""
        return self.batch * self.sequence // self.cp

    def product(self, p: Product, batch: int = 1, bits8: float = 0.0) -> float:
        """Return the seconds of a product, or of `batch` of them at once."""
        rate = (self.device.peak8 * bits8 if bits8 else self.device.peak) * self.device.reached
        seconds = _work(*p, batch, self.device.units) / rate
        seconds *= self.known["unaligned"] if any(size % 64 for size in p) else 1.0
        moved = self.width * batch * (p.m * p.k + p.k * p.n + p.m * p.n)
        return max(seconds + self.known["launch"], self.streamed(moved))

    def streamed(self, moved: float) -> float:
        """Return the seconds of element-wise work on `moved` bytes."""
        return moved / (self.device.bandwidth * self.known["streamed"]) + self.known["launch"]


@dataclass(frozen=True)
class Layer:
    """Seconds of one layer and one microbatch: forward and backward without attention, and
    attention's scores.

    `products` are all products forward, `last` the last of them.
    """

    forward: float
    backward: float
    attention: float
    attention_back: float
    products: float
    last: float


@cache
def _work(m: int, n: int, k: int, batch: int, units: int) -> float:
    """Return the operations the best tiles make of a product: more than 2mnk, for tiles and waves
    that are not full.
    """
    if units == 1:
        return 2.0 * m * n * k * batch
    best = math.inf
    for rows, columns, well in TILES:
        tiles = -(-m // rows) * -(-n // columns) * batch
        for split in SPLITS:
            waves = -(-tiles * split // units)
            best = min(best, waves * units * 2 * rows * columns * (k / split + START) / well)
    return best


def attention(share: Share, back: bool) -> float:
    """Return the seconds of softmax(QK')V, or of its backward."""
    device, known, model, sequence = share.device, share.known, share.model, share.sequence
    heads, dim = share.batch * max(1, model.heads // share.tp), model.head_dim
    attended = min(sequence, model.window or sequence)
    if share.kernel == "unfused":
        mine = sequence // share.cp
        twice = sum(
            share.product(Product(mine, *both), batch=heads)
            for both in ((attended, dim), (dim, attended))
        )
        return (2 * twice if back else twice) + share.streamed(
            (11 if back else 9) * heads * mine * attended
        )
    triton = known["triton_ampere"] if device.generation == "ampere" else known["triton_hopper"]
    speed = device.flash if share.kernel == "flash" else triton
    speed *= min(1.0, (dim / 128) ** known["narrow_heads"])
    blocks = heads * -(-sequence // share.cp // 128)
    full = (
        blocks / (-(-blocks // device.units) * device.units) if blocks < 8 * device.units else 1.0
    )
    pairs = heads * sequence * attended / share.cp * (0.5 if attended == sequence else 1.0)
    seconds: float = 4 * pairs * dim / (device.peak * speed * full)
    return (2.5 * seconds / known["backward_attention"] if back else seconds) + known["launch"]


@cache
def layer(share: Share) -> Layer:
    """Return the seconds of a layer by kind of work. Its backward has two products for each of the
    forward.
    """
    model, tokens, tp, bits8 = share.model, share.tokens, share.tp, share.bits8
    products = model.products(tokens, tp, share.ep)
    forward = [share.product(p, bits8=bits8) for p in products]
    back = [
        share.product(Product(*sizes), bits8=bits8)
        for p in products
        for sizes in ((p.m, p.k, p.n), (p.k, p.n, p.m))
    ]
    elements = model.elements(tokens, tp, share.sp)
    cast = (
        share.streamed(6 * tokens * (model.hidden / (tp if share.sp else 1) + model.ffn / tp))
        if bits8
        else 0.0
    )
    scale = share.passes * share.width / 2
    aside, aside_back = (
        sum(share.streamed(scale * each[i]) for each in elements) + cast for i in (0, 1)
    )
    scores = attention(share, back=False), attention(share, back=True)
    return Layer(
        sum(forward) + aside,
        sum(back) + aside_back,
        *scores,
        products=sum(forward),
        last=forward[-1],
    )


@cache
def head(share: Share, loss_bytes: tuple[int, int]) -> float:
    """Return the seconds of logits and loss, forward and backward: three products, and bytes for
    each logit.
    """
    columns = -(-share.model.vocabulary // share.tp // 64) * 64
    seconds = sum(share.streamed(each * share.tokens * columns) for each in loss_bytes)
    return seconds + 3 * share.product(Product(share.tokens, columns, share.model.hidden))
