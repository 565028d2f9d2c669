"""`python -m minidist stages`: one training run under every strategy that shards: what each holds, sends and costs.

              parameters  gradients  optimizer  activations  communication │ sent a step │ tokens/s │ difference
DDP
ZeRO-1
...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minidist.cli import compare
from minidist.cli.compare import Variant
from minidist.trainer.checked import layout_of
from minidist.trainer.config import Config


def main(argv: Sequence[str]) -> int:
    """Run all stages; return the exit status: 0, 1 if one differs from the serial run, 2 for unusable input.

    Parameters
    ----------
    argv : sequence of str
        Options of `train`. What they say of `--zero`, `--hsdp` and `--recompute` is overruled.
    """
    return compare.main("stages", argv, stages)


def stages(config: Config, ranks: int) -> list[Variant]:
    """Return the variants: the same run under each strategy."""
    layout = layout_of(config, ranks)

    def stage(name: str, zero: int, hsdp: int = 0, recompute: str = "none") -> Variant:
        parallel = replace(config.parallel, strategy="ddp", zero=zero, hsdp=hsdp, zeropp=False)
        memory = replace(config.memory, recompute=recompute)
        return Variant(name, replace(config, parallel=parallel, memory=memory), layout)

    found = [stage("DDP", 0), stage("ZeRO-1", 1), stage("ZeRO-2", 2), stage("ZeRO-3", 3)]
    if layout.dp > 2 and layout.dp % 2 == 0:
        found.append(stage("ZeRO-3 in groups of 2", 3, hsdp=2))
    return [*found, stage("ZeRO-3, recompute full", 3, recompute="full")]
