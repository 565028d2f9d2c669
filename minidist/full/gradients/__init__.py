"""Gradients that know that they are a part.

`gradient.py` has what is asked of all of a gradient answered by all ranks, so that torch's own
clipping and scaling stay right; `questions.py` lists what can be asked.
"""
