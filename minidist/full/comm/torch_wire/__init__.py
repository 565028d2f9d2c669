"""The `torch` wire: ranks are processes of torch.distributed, over gloo or NCCL.

Read `torch_wire.py`, then `torch_request.py` (one message), `torch_groups.py` (groups), `gpus.py`
(which GPU is a rank's), `store.py` (what ranks tell each other beside messages), `cuda_stream.py`
and `native_torch.py` (the engine's own streams and collectives), `stalls.py` (how long a GPU
waits), `marks.py` (spans in a profiler). `torch_member.py` is a process of a job that replaces the
ranks it loses (see `full/comm/membership/`), with `tcp_store.py`, what its members agree by, and
`sockets.py`, which wakes those who wait.
"""
