"""Floor 4: where the memory goes, and offloading.

Read `account.py`, then `offload.py`. `hooks.py` has the
hooks of strategies, which tell whether a model has been wrapped already.
"""
