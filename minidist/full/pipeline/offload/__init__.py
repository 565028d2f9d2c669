"""Weights of stages that wait: to host memory, and back in time.

rank 0    2FETCH0 │ 0F4  2F2  2B0  0F5 │ 2OFF1 │ 0B1 ...

`pauses.py` adds such actions to a plan, where a stage waits for long enough; it needs no torch.
`host.py` carries them out: copies beside the computing, and storages that are freed and filled again.
"""
