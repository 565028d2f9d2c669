"""Tensor parallelism: every matrix is cut; and sequence parallelism between the cuts.

Read `plain.py`, one page, with `full/adjoint.py`. Then read `tensor_parallel.py`,
`vocabulary.py` and `sequence.py`. `styles.py` and `plan.py` apply them to a serial model from
outside; `layers.py` has layers that are built directly. `options.py` has what a user can ask for.
"""
