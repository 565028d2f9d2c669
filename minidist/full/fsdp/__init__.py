"""ZeRO-3: the parameters, the gradients and the optimizer's state are shared out.

Read `plain.py` first: all three stages of ZeRO as loops (`layers.py` checks their layers). Then read
what a model is made of, from the inside out:

`flat.py` has a `Shard`, this rank's part of parameters laid end to end, and a `Flat`, which *has*
one, and a tensor of all elements that exists while it is used. `unit.py`: a `Unit` has flats, which
are gathered and freed together. `window.py`: a `Window` says which units have memory, and which is
gathered next. `passes.py`: `Passes` are the hooks that tell the window what is needed, and reduce
gradients. `fsdp.py`: `FSDP` has all of these, and is what a user sees.

`ranks.py` says who cuts what, and compares what the ranks do; `policy.py` chooses the units.
`access/` is what is asked from outside, between the uses of a
unit. The optimizers of slices are in `full/optimizer/over_slices.py`, the options in
`full/ddp/options.py`.

One unit is gathered ahead: in forward `Window.enter` says which, in backward `Window.ahead`, when
`Passes` asks it. `MOST` (`window.py`) is only how many units may have memory.
"""

from minidist.full.fsdp.plain import PlainUnit, PlainZeRO

__all__ = ["PlainUnit", "PlainZeRO"]
