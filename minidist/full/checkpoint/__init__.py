"""Sharded checkpoints: every rank writes its own pieces, and any layout of ranks reads them.

Read `plain.py`, one page, with `pieces.py`. Then `store.py` and `index.py` (what lies on the disk:
the folder, and the only code that writes or reads the format of the index), `saving.py` and
`restore.py`. `cadence.py` how often to save, `lock.py` why no two
runs share a folder. What is kept beside parameters and optimizer (scales of 8 bits, biases of
routers) is what the `state` of each strategy names; `remembered.py` has what ranks hold each for
itself, such as gradients that were not sent yet.
"""
