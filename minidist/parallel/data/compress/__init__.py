"""Gradients that travel in fewer bytes, and lose nothing for good: what is not sent is kept, and added to
the next gradient.

Read `power_sgd.py`, which is an algorithm on a page, then `compressed.py`, which applies it to the
buckets of DDP, beside backward. `options.py` reads what a user asks for, `powersgd:4`.
"""
