"""SparseLoCo: an outer step in a hundredth of its bytes.

Read `sparse_step.py`. `strategy.py` lets sites send it, and `options.py` has what a user can ask for.
"""
