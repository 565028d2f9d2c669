"""What is asked of a sharded model from outside, between the uses of its units.

`freed.py` lets a parameter without memory refuse to be read, `linked.py` lets `parameter.grad` be
the gradient of this rank's slice, `closed.py` refuses torch's state dicts. What works instead:
`state.py` makes the whole state, to save or load it, and `methods.py` gathers a unit for methods
that are not `forward`.
"""
