"""ZeRO-3: the parameters, the gradients and the optimizer's state are shared out.

    the book                    here
    unshard, before a forward   `Passes.pre_forward`, which calls `Window.enter`, and so gathers the next one
    reshard, after it           `Passes.post_forward`
    unshard, before a backward  `Passes.pre_backward`
    its last gradient arrives   `Passes.gradient_arrived`, which has `Flat.reduce` called on the stream
    reshard, after a backward   `Passes.post_backward`

Read `minidist/fsdp.py` first, and before it `minidist/zero.py`, where all three stages of ZeRO are
loops. Then read what a model is made of, from the inside out:

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
