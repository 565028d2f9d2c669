"""What is measured: a file for each bench, minidist and its peers doing the same thing; the collectives share one.

`training.py` has the model and the steps that the benches of training share.
"""
