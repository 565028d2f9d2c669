"""ZeRO 1 and 2: the optimizer's state and the gradients are shared out.

Read `zero.py`: three phases, during backward and at its end. `sharded_optimizer.py` shards the
optimizer's state alone.
"""
