"""`python -m minidist layouts`: one training run on several layouts of the same ranks, side by
side.

              parameters  gradients  optimizer  activations │ sent along dp │ pp │ tp │ tokens/s │ difference
dp=4
dp=2 tp=2
pp=2 tp=2
pp=2 tp=2, sequence parallel
dp=2 pp=2
"""

from collections.abc import Sequence
from dataclasses import replace

from minidist.cli.variants import compare
from minidist.full.trainer.config import ConfigError
from minidist.further import Config


def main(argv: Sequence[str]) -> int:
    """Run all layouts.

    Return the exit status: 0, 1 if one differs from the serial run, 2 for unusable input.

    Parameters
    ----------
    argv : sequence of str
        Options of `train`. What they say of `--dp`, `--tp`, `--pp`, `--cp` and `--sp` is overruled.
    """
    return compare.main("layouts", argv, layouts)


def layouts(config: Config, ranks: int) -> dict[str, Config]:
    """Return the layouts by name: data parallelism alone, each pair of axes, and with eight ranks
    all three axes.
    """
    if ranks < 2 or ranks % 2:
        raise ConfigError(
            f"{ranks} ranks cannot be laid out in two ways: use mpirun -n 4, or another even number"
        )
    half = ranks // 2
    shapes = [(ranks, 1, 1), (half, 1, 2), (1, 2, half), (half, 2, 1)]
    if ranks % 4 == 0 and ranks > 4:
        shapes.append((ranks // 4, 2, 2))
    found = {}
    for dp, pp, tp in shapes:
        name = " ".join(
            f"{axis}={size}" for axis, size in (("dp", dp), ("pp", pp), ("tp", tp)) if size > 1
        )
        asked = replace(config.parallel, dp=dp, pp=pp, cp=1, tp=tp, sp=False)
        if pp == 1:
            asked = replace(
                asked, schedule="1f1b", microbatches=0, chunks=0, plan="", offload_stages=0.0
            )
        found[name] = replace(config, parallel=asked)
        if tp > 1 and pp > 1:
            found[f"{name}, sequence parallel"] = replace(
                config,
                parallel=replace(asked, sp=True),
            )
    return found
