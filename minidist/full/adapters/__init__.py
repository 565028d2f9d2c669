"""Adapters: train two thin matrices beside a frozen weight, which is stored in full precision or in
4 bits.

Read `lora.py`, then `nf4.py`.
"""

from minidist.full.adapters.lora import EVERY_MATRIX, LoRALinear, add_lora, add_qlora, merge
from minidist.full.adapters.nf4 import dequantize, levels, quantize

__all__ = [
    "EVERY_MATRIX",
    "LoRALinear",
    "add_lora",
    "add_qlora",
    "dequantize",
    "levels",
    "merge",
    "quantize",
]
