"""Gradients that travel in fewer bytes, and lose nothing for good: what is not sent is kept, and
added to the next gradient.

Read `sparse_all_reduce` of `minidist/slow_wires.py` first: top-k with error feedback. Each way is
an algorithm of its own: `power_sgd.py`, `top_k.py`, `one_bit.py` and `int8.py`; then
`compressed.py`, which applies them to the buckets of DDP, while backward runs. `flat.py` lays
gradients end to end, and `options.py` reads what a user asks for, `powersgd:4`.
"""
