"""How long a device computes: products by tiles and waves, attention by its kernel, the rest by its
bytes.

    product     tiles of the result are dealt out to the device's processors, a wave of them at a time; the last wave
                is as long as a full one. A product is never faster than its bytes can be read.
    attention   a fused kernel at its share of the peak, or products of scores and what is read between them
    the rest    bytes / (bandwidth x `streamed`)

A device with one unit, a core, has no waves to fill: its products take 2 m n k operations.

(Waves and tiles: NVIDIA, Matrix multiplication background, 2023. Rooflines: Williams et al. 2009.)
"""

import math
from dataclasses import dataclass
from functools import cache

from minidist.model.config import attended_pairs
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

    Attention has a `kernel`: "unfused" writes and reads all scores, "triton" and "flash" compute the
    causal half. `bits8` is the speed of 8-bit products beside the data sheet's, 0 for 16 bits. An
    element has `width` bytes, and element-wise work moves `passes` times the bytes of fused kernels.
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
        peak = self.device.peak8 * bits8 if bits8 else self.device.peak
        rate = peak * self.device.reached
        seconds = _work(*p, batch, self.device.units) / rate
        if any(size % 64 for size in p):
            seconds *= self.known["unaligned"]
        elements = p.m * p.k + p.k * p.n + p.m * p.n
        moved = self.width * batch * elements
        return max(seconds + self.known["launch"], self.streamed(moved))

    def streamed(self, moved: float) -> float:
        """Return the seconds of element-wise work on `moved` bytes."""
        return moved / (self.device.bandwidth * self.known["streamed"]) + self.known["launch"]


@dataclass(frozen=True)
class Layer:
    """Seconds of one layer and one microbatch: forward and backward without attention's scores, and
    those scores.

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
    """Return the operations that the best tiles need for a product: more than 2mnk, because tiles
    and waves are not full.
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
    device, known, model = share.device, share.known, share.model
    heads = share.batch * max(1, model.heads // share.tp)
    attended = min(share.sequence, model.window or share.sequence)
    if share.kernel == "unfused":
        return unfused_attention(share, back, heads, attended)
    if share.kernel == "flash":
        speed = device.flash
    else:
        ampere = device.generation == "ampere"
        speed = known["triton_ampere"] if ampere else known["triton_hopper"]
    speed *= min(1.0, (model.head_dim / 128) ** known["narrow_heads"])
    # blocks of 128 queries are dealt out to the processors, in waves: the last one may not be full
    blocks = heads * -(-share.sequence // share.cp // 128)
    full = 1.0
    if blocks < 8 * device.units:
        waves = -(-blocks // device.units)
        full = blocks / (waves * device.units)
    pairs = heads * pairs_of(share.sequence, attended) / share.cp
    seconds: float = 4 * pairs * model.head_dim / (device.peak * speed * full)
    if back:
        seconds = 2.5 * seconds / known["backward_attention"]
    return seconds + known["launch"]


def pairs_of(sequence: int, attended: int) -> float:
    """Return the pairs of query and key of a head: the causal half of all, or those in a window."""
    if attended == sequence:
        return 0.5 * sequence * sequence
    return attended_pairs(sequence, attended)


def unfused_attention(share: Share, back: bool, heads: int, attended: int) -> float:
    """Return the same where scores are written and read: two products, and bytes for each score."""
    queries = share.sequence // share.cp
    dim = share.model.head_dim
    scores = share.product(Product(queries, attended, dim), batch=heads)
    products = scores + share.product(Product(queries, dim, attended), batch=heads)
    if back:
        products *= 2
    bytes_a_score = 11 if back else 9
    return products + share.streamed(bytes_a_score * heads * queries * attended)


@cache
def layer(share: Share) -> Layer:
    """Return the seconds of a layer by kind of work.

    Its backward has two products for each of the forward.
    """
    model, tokens, tp = share.model, share.tokens, share.tp
    forward, back = [], []
    for p in model.products(tokens, tp, share.ep):
        forward.append(share.product(p, bits8=share.bits8))
        back.append(share.product(Product(p.m, p.k, p.n), bits8=share.bits8))  # of its input
        back.append(share.product(Product(p.k, p.n, p.m), bits8=share.bits8))  # of its weights
    # what is element-wise, counted for fused kernels and 16 bits
    scale = share.passes * share.width / 2
    aside = aside_back = 0.0
    for each in model.elements(tokens, tp, share.sp):
        aside += share.streamed(scale * each.forward)
        aside_back += share.streamed(scale * each.backward)
    if share.bits8:  # inputs are cast
        channels = model.hidden / (tp if share.sp else 1) + model.ffn / tp
        cast = share.streamed(6 * tokens * channels)
        aside += cast
        aside_back += cast
    return Layer(
        forward=sum(forward) + aside,
        backward=sum(back) + aside_back,
        attention=attention(share, back=False),
        attention_back=attention(share, back=True),
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
