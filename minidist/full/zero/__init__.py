"""ZeRO 1 and 2: the optimizer's state and the gradients are shared out.

Read `zero.py`: three phases, during backward and at its end. `sharded_optimizer.py` shards the
optimizer's state alone. `zero_plus_plus.py` is ZeRO-3 in fewer bytes, by another `Transport` of
the flats of `full/fsdp/`.
"""
