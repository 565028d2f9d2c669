"""ZeRO++: ZeRO-3 in a quarter of the bytes between nodes.

Read `zero_plus_plus.py`: another `Transport` of the flats of `full/fsdp/`. `strategy.py` puts it in
the place of FSDP on the data axis, and `options.py` has what a user can ask for.
"""
