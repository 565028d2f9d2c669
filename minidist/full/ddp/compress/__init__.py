"""Gradients that travel in fewer bytes, and lose nothing for good: what is not sent is kept, and
added to the next gradient.

Read `sparse_all_reduce` of `minidist/slow_wires.py` first: top-k with error feedback. Then read
`top_k.py`, and `compressed.py`, which applies it, or another algorithm that is `Compressed`, to the
buckets of DDP, while backward runs. `flat.py` lays gradients end to end, and `options.py` reads what
a user asks for, `topk:0.01`.
"""
