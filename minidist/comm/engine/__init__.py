"""What the wires of processes share, which stand on an engine: MPI, gloo, NCCL.

answers.py      a roll call, by one all-gather of bytes
pool.py         groups of ranks, and how they are used again
operation.py    what an engine can be asked to reduce
"""
