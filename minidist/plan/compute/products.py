"""How long one product takes: by tiles and waves, at the share of the peak that its precision
reaches.

    product     tiles of the result are dealt out to the device's processors, a wave of them at a time; the last wave
                is as long as a full one. A product is never faster than its bytes can be read.
    grouped     the products of many experts in one kernel. A tile is done before the next weights are there: seconds
                of operations and of bytes add up (measured: `constants.toml`, grouped)
    streamed    the rest: bytes / (bandwidth x `streamed`)

A device with one unit, a core, has no waves to fill: its products take 2 m n k operations.

(Waves and tiles: NVIDIA, Matrix multiplication background, 2023. Rooflines: Williams et al. 2009.)
"""

import math
from dataclasses import dataclass
from functools import cache

from minidist.plan.device import Constants, Device, PlanError
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

PRECISIONS = ("bf16", "fp8", "fp8-rows", "mxfp8", "nvfp4")
"""Of products: 16 bits; 8 bits with a scale by tensor, by row, or by 32 elements; 4 bits with a scale
by 16 elements.
"""


def check_precision(precision: str, device: Device) -> None:
    """Raise PlanError if a device has no products of a precision that are faster."""
    if precision in PRECISIONS[1:] and peak_of(device, precision) <= device.peak:
        bits = 4 if precision == "nvfp4" else 8
        raise PlanError(
            f"--precision {precision}: {device.name} multiplies no faster in {bits} bits: leave it "
            "out"
        )


def peak_of(device: Device, precision: str) -> float:
    """Return the FLOP/s of a data sheet for products of a precision."""
    peaks = {"bf16": device.peak, "nvfp4": device.peak4}
    return peaks.get(precision, device.peak8)


def speed(device: Device, known: Constants, precision: str) -> float:
    """Return the FLOP/s that large products of a precision reach."""
    if precision == "bf16":
        return device.peak * device.reached
    if precision == "nvfp4":
        return device.peak4 * device.reached4
    reached = device.reached8 or device.reached * known["eight_bits"]
    if precision == "fp8-rows":
        reached *= known["eight_bits_rows"]
    if precision == "mxfp8":
        reached *= known["eight_bits_blocks"]
    return device.peak8 * reached


@dataclass(frozen=True)
class Share:
    """What one rank computes of a layer: `batch` sequences, 1/cp of the tokens, 1/tp of the heads
    and channels.

    Attention has a `kernel`: "unfused" writes and reads all scores, "triton", "flash" and "flash3" compute
    the causal half. `precision` is that of products. An element has `width` bytes, and element-wise work
    moves `passes` times the bytes of fused kernels. What routes tokens to experts moves `routing`
    times the bytes of what those read and return.
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
    precision: str
    width: int = 2
    passes: float = 1.0
    routing: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on this rank."""
        return self.batch * self.sequence // self.cp

    def product(self, p: Product, batch: int = 1, precision: str = "bf16") -> float:
        """Return the seconds of a product, or of `batch` of them at once."""
        rate = speed(self.device, self.known, precision)
        seconds = work(*p, batch, self.device.units) / rate
        if any(size % 64 for size in p):
            seconds *= self.known["unaligned"]
        elements = p.m * p.k + p.k * p.n + p.m * p.n
        moved = self.width * batch * elements
        return max(seconds + self.known["launch"], self.streamed(moved))

    def grouped(self, p: Product, groups: int, precision: str, result: int) -> float:
        """Return the seconds of `groups` equal products in one kernel; an element of the result
        moves `result` bytes. One alone is a product as any other.
        """
        if groups == 1:
            return self.product(p, precision=precision)
        slower = "grouped_cdna" if self.device.generation == "cdna" else "grouped"
        rate = speed(self.device, self.known, precision) * self.known[slower]
        operations = work(*p, groups, self.device.units)
        of_inputs = 1 if precision != "bf16" else self.width
        moved = groups * (of_inputs * (p.m * p.k + p.k * p.n) + result * p.m * p.n)
        return operations / rate + self.streamed(moved)

    def streamed(self, moved: float) -> float:
        """Return the seconds of element-wise work on `moved` bytes."""
        return moved / (self.device.bandwidth * self.known["streamed"]) + self.known["launch"]


@cache
def work(m: int, n: int, k: int, batch: int, units: int) -> float:
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
