"""The house: the ideas of the book for any model, fast, over every wire, guarded against misuse.

Each strategy is applied to a serial model from outside; the model's file never changes. Read from
the bottom: `comm/`, `collectives/`, `model/` and `mesh.py`, which names the axes of ranks. Then
`ddp/`, `zero/` and `fsdp/` with `optimizer/`, `tensor/` with `adjoint.py`, `context/`, `expert/`,
`pipeline/`, `slow_wires/`. `layers/` is what a rank does with its own layers: `recompute/`,
`precision/`, `adapters/`. All share these: `placement.py` records which elements of a parameter a
rank has, `gradients/` has what is asked of all of a gradient answered by all ranks, so that torch's
own clipping and scaling stay right, and `replica.py` says what is asked of any strategy over the
data axis. The files that join them come last: `recipe.py` has all options, `strategy.py` says what
a strategy is asked, `data_axis.py` chooses between data parallelism and ZeRO, `apply.py` applies
all, in one order, and `clip.py` clips gradients. `meta.py` is for models that are too large to be
built. Above stand `data/`, `checkpoint/`, `trainer/` and `launch/`.

To change an option's default, open `options.py` in the folder of its strategy: the command line,
`Recipe` and the planner read it there. `options.py` here says what an option is.

`adjoint` has the differentiable collectives, for layers of your own; Megatron's four are exported
here as well.

Most files need torch, and `pipeline/` plans without it. So the names that are exported stand in
`exports.py`, which is imported when one of them is asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minidist.full.exports import *
else:
    from importlib import import_module

    def __getattr__(name):
        return getattr(import_module("minidist.full.exports"), name)
