"""Tensor parallelism: every matrix is cut; and sequence parallelism between the cuts.

Read `tensor_parallel.py` with `parallel/adjoint.py`, then `vocabulary.py` and `sequence.py`. `styles.py` and `plan.py`
apply them to a serial model from outside; `layers.py` has layers to build directly.
"""
