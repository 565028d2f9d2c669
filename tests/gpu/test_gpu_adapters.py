"""Adapters beside a Llama's weights, as they are or in 4 bits; products in 8 bits; ZeRO++: over
NCCL.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jobs import RANKS, verified
from torch import nn

from minidist.full.model import GPT, GPTConfig
from minidist.full.trainer.foreign import save_llama

RUNS = {
    1: ("--lora 4", "--qlora --recompute full"),
    2: (
        "--lora 4 --zero 1 --accumulate 2",
        "--qlora --zero 3 --recompute full",
        "--lora 4 --tp 2 --sp",
        "--qlora --precision bfloat16 --zero 3",
        "--lora 4 --precision fp8",
        "--zero 3 --zeropp --no-verify",
    ),
    4: (
        "--lora 2 --tp 2 --sp --zero 2",
        "--qlora --pp 2 --schedule zb-h1",
        "--lora 4 --pp 2 --zero 3 --schedule gpipe",
        "--zero 3 --zeropp --no-verify",
    ),
}


@pytest.mark.gpu
@pytest.mark.timeout(230)
@pytest.mark.parametrize("ranks", RANKS)
def test_adapters_train_what_the_serial_run_does(ranks: int, tmp_path: Path) -> None:
    model = GPT(GPTConfig(layers=2, hidden=16, heads=4, sequence=16, rope_theta=500_000.0))
    for number, parameter in enumerate(model.parameters()):
        nn.init.normal_(parameter, 0.1, 0.2, generator=torch.Generator().manual_seed(number))
    save_llama(model, tmp_path)
    runs = [f"--layers 2 --init {tmp_path} {words}" for words in RUNS[ranks]]
    verified(ranks, len(runs), *runs, timeout=200)
