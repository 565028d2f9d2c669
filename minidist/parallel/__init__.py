"""Floor 4: strategies. Each is applied to a serial model from outside; the model's file never
changes.

Read `data/` (DDP), `sharded/` (ZeRO 1 to 3) with `optimizer/`, `tensor/` with `adjoint.py`,
`context/`, then `pipeline/`, then `sites/` for slow wires and `stale/` for old weights. `layers/`
is what a rank does with its own layers. All share these: `placement.py` records which elements of a
parameter a rank has, `gradient.py` has what is asked of all of a gradient answered by all ranks
(`questions.py` lists what can be asked), so that torch's own clipping and scaling stay right, and
`replica.py` says what is asked of any strategy over the data axis. The files that join them come
last: `recipe.py` has all options, `strategy.py` says what a strategy is asked, `data_axis.py`
chooses between data parallelism and ZeRO, `apply.py` applies all, in one order, and `clip.py` clips
gradients. `meta.py` is for models that are too large to be built.

To change an option's default, open `options.py` in the folder of its strategy: the command line,
`Recipe` and the planner read it there.

`adjoint` has the differentiable collectives, for layers of your own; Megatron's four are exported
here as well.

Most files need torch, and `pipeline/` plans without it. So the names that are exported stand in
`exports.py`, which is imported when one of them is asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minidist.parallel.exports import *
else:
    from minidist.lazy import names_in

    __getattr__ = names_in("minidist.parallel.exports")
