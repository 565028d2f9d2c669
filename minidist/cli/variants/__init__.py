"""Commands that run several variants of a run, and compare them: `stages.py` those of ZeRO,
`layouts.py` those of the mesh, both by `compare.py`, whose variants have the numbers of the serial
run; `losses.py` those that have not.
"""
