"""`python -m minidist stages`: one training run under every strategy that shards: what each holds,
sends and costs.

              parameters  gradients  optimizer  activations  communication │ sent a step │ tokens/s │ difference
DDP
ZeRO-1
...
"""

from collections.abc import Sequence
from dataclasses import replace

from minidist.cli.variants import compare
from minidist.full.trainer.checked import layout_of
from minidist.further import Config


def main(argv: Sequence[str]) -> int:
    """Run all stages.

    Return the exit status: 0, 1 if one differs from the serial run, 2 for unusable input.

    Parameters
    ----------
    argv : sequence of str
        Options of `train`. What they say of `--zero`, `--hsdp` and `--recompute` is overruled.
    """
    return compare.main("stages", argv, stages)


def stages(config: Config, ranks: int) -> dict[str, Config]:
    """Return the variants: the same run under each strategy."""

    def stage(zero: int, hsdp: int = 0, recompute: str = "none") -> Config:
        parallel = replace(
            config.parallel, strategy="ddp", zero=zero, hsdp=hsdp, zeropp=False, offload_stages=0.0
        )
        return replace(
            config, parallel=parallel, memory=replace(config.memory, recompute=recompute)
        )

    found = {"DDP": stage(0), "ZeRO-1": stage(1), "ZeRO-2": stage(2), "ZeRO-3": stage(3)}
    data_ranks = layout_of(config, ranks).dp
    if data_ranks > 2 and data_ranks % 2 == 0:
        found["ZeRO-3 in groups of 2"] = stage(3, hsdp=2)
    return found | {"ZeRO-3, recompute full": stage(3, recompute="full")}
