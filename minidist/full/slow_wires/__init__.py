"""Sites that a slow wire joins: each trains a replica of its own, and now and then they meet.

    the book               here
    every H steps          each fragment every H steps, in turn: 1/F of the bytes at a time
    all_reduce             `_send`, on a stream; `_merge` waits for it some steps later
    parameter              what the optimizer updates: a slice under ZeRO, `_master` of 16 bits
    parameter.copy_        `_overwrite`: mixing * parameter + (1 - mixing) * shared

    a step       inside a site: everything that the other axes do, and the optimizer's step
    every H      between sites: what H steps have changed is averaged, and an outer optimizer takes it

Read `minidist/slow_wires.py` first: its `DiLoCo` moves all of the model at once. `outer.py` does
the same in fragments, while training goes on, for slices and masters. `strategy.py` joins it to the
other strategies, and `options.py` has what a user can ask for.
"""
