"""Floor 4: where the memory goes, and how to need less: recomputation, lower precision, adapters,
offloading.

Read `account.py`, `recompute/`, `precision/`, `adapters/`, then `offload.py`. `hooks.py` has the
hooks of strategies, which tell whether a model has been wrapped already.
"""
