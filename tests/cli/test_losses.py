"""`losses`: the same run in ways that change its numbers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from training import TINY, short_text

import minidist
from minidist.cli.variants.losses import STALE, StaleTrainer, compare, serial
from minidist.full.comm import Communicator
from minidist.full.data.text import read_corpus
from minidist.full.trainer.start import start_of
from minidist.further import parse
from minidist.slow_wires import train_delayed


def test_a_row_for_each_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, file = short_text(tmp_path, 4000), tmp_path / "rows.jsonl"
    argv = [*TINY, *f"--text {text} --steps 11 --metrics {file}".split()]
    assert max(minidist.run(lambda comm: compare(argv, comm), 2)) == 0
    rows = {row["name"]: row for row in map(json.loads, file.read_text().splitlines())}
    assert set(rows) > {"DDP", "DiLoCo, H = 10", *STALE}
    assert all(len(set(row["losses"])) == 3 for row in rows.values())
    assert rows["DDP"]["sent"] == 11 * rows["DiLoCo, H = 10"]["sent"], "one meeting in 11 steps"
    assert rows["PowerSGD, rank 4"]["sent"] < rows["DDP"]["sent"] / 2
    assert "beside DDP" in capsys.readouterr().out


@pytest.mark.parametrize("stale", [0, 2])
def test_stale_training_is_sgd_with_a_delay(stale: int, tmp_path: Path) -> None:
    words = f"--text {short_text(tmp_path, 900)} --steps 6 --precision float64 --clip 0 --warmup 0"
    config = parse(
        [*TINY, *words.split(), "--lr-schedule", "wsd", "--cooldown", "1", "--lr", "0.01"]
    )
    corpus = read_corpus(config.data)

    def program(comm: Communicator) -> tuple[Any, Any]:
        checked = serial(config, comm, corpus, measured=False)
        trainer = StaleTrainer(checked, start_of(checked, corpus.samples))
        trainer.stale = stale
        begun = copy.deepcopy(trainer.model)
        batches = [
            batch
            for batch, _ in zip(start_of(checked, corpus.samples).batches, range(5), strict=False)
        ]
        kept = []

        def watch(step: int, batch: Any, rate: float, plain: Any = trainer.step) -> Any:
            kept.append(copy.deepcopy(trainer.model))
            return plain(step, batch, rate)

        trainer.step = watch  # type: ignore[method-assign]
        trainer.run()
        groups = [
            {"params": [p for p in begun.parameters() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in begun.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
        train_delayed(
            [begun],
            [stale + 1],
            batches,
            lambda batch: torch.nn.functional.cross_entropy(
                begun(batch.inputs).flatten(0, 1), batch.targets.flatten()
            ),
            [optimizer],
        )
        return kept[5], begun

    ((ours, theirs),) = minidist.run(program, 1)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
