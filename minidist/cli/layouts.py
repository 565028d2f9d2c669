"""`python -m minidist layouts`: one training run on several layouts of the same ranks, side by side.

              parameters  gradients  optimizer  activations │ sent along dp │ pp │ tp │ tokens/s │ difference
dp=4
dp=2 tp=2
pp=2 tp=2
pp=2 tp=2, sequence parallel
dp=2 pp=2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from minidist.cli import compare
from minidist.cli.compare import Variant
from minidist.mesh import Layout
from minidist.trainer.config import Config, ConfigError


def main(argv: Sequence[str]) -> int:
    """Run all layouts; return the exit status: 0, 1 if one differs from the serial run, 2 for unusable input.

    Parameters
    ----------
    argv : sequence of str
        Options of `train`. What they say of `--dp`, `--tp`, `--pp` and `--sp` is overruled.
    """
    return compare.main("layouts", argv, variants)


def variants(config: Config, ranks: int) -> list[Variant]:
    """Return the layouts by name: data parallelism alone, each pair of axes, and with eight ranks all three axes."""
    if ranks < 2 or ranks % 2:
        raise ConfigError(f"{ranks} ranks cannot be laid out in two ways: use mpirun -n 4, or another even number")
    half = ranks // 2
    shapes = [Layout(dp=ranks), Layout(dp=half, tp=2), Layout(pp=2, tp=half), Layout(dp=half, pp=2)]
    if ranks % 4 == 0 and ranks > 4:
        shapes.append(Layout(dp=ranks // 4, pp=2, tp=2))
    found = []
    for layout in dict.fromkeys(shapes):
        found.append(_variant(config, layout, sequence=False))
        if layout.tp > 1 and layout.pp > 1:
            found.append(_variant(config, layout, sequence=True))
    return found


def _variant(config: Config, layout: Layout, sequence: bool) -> Variant:
    sizes = {axis: size for axis, size in asdict(layout).items() if axis in ("dp", "pp", "tp")}
    asked = config.parallel
    if layout.pp == 1:
        asked = replace(asked, schedule="1f1b", microbatches=0, chunks=0, plan="")
    name = " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    parallel = replace(asked, dp=layout.dp, pp=layout.pp, tp=layout.tp, sp=sequence)
    return Variant(f"{name}, sequence parallel" if sequence else name, replace(config, parallel=parallel), layout)
