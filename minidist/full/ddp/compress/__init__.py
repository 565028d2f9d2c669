"""Gradients that travel in fewer bytes, and lose nothing for good: what is not sent is kept, and
added to the next gradient.

Read `plain.py` first: top-k with error feedback. Then `top_k.py`, and `compressed.py`, which applies
it, or another algorithm that is `Compressed`, to the buckets of DDP, beside backward. `flat.py` lays
gradients end to end, and `options.py` reads what a user asks for, `topk:0.01`.
"""
