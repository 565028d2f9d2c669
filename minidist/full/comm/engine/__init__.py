"""What the wires of processes share, which stand on an engine: MPI, gloo, NCCL.

host.py         which ranks share a machine
pool.py         groups of ranks, and how they are used again
operation.py    what an engine can be asked to reduce
"""
