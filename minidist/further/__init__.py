"""Strategies that few people need, each a plug-in of `full/`, which names none of them.

    zero_plus_plus/   ZeRO-3 in a quarter of the bytes between nodes
    compress/         gradients in fewer bytes: PowerSGD, int8, 1bit
    muon/             Muon, whose matrices ranks hold in parts
    nf4/              adapters beside weights in four bits
    sparse_step/      an outer step of sites in a hundredth of its bytes
    sharded_optimizer.py   the optimizer's state alone, next to anybody's data parallelism
    stale/            pipelines and servers that use old weights; not for the trainer

A strategy has its options, and a subclass of the `Strategy` in whose place it stands, or a function
that this is given. `plugged_in.py` names both: there are the extended `ORDER`, `Recipe` and
`Config`, which whoever wants them hands to `full/`. `few_bits.py` has numbers in 8, 4 or 1 bits,
which the first two send.

Most files need torch, so these names are imported when one of them is asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minidist.further.plugged_in import *
else:
    from importlib import import_module

    def __getattr__(name):
        return getattr(import_module("minidist.further.plugged_in"), name)
