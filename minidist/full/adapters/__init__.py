"""Adapters: train two thin matrices beside a frozen weight. Read `lora.py`."""

from minidist.full.adapters.lora import EVERY_MATRIX, LoRALinear, add_lora, merge

__all__ = [
    "EVERY_MATRIX",
    "LoRALinear",
    "add_lora",
    "merge",
]
