"""How torch finds us: the backend's name, and the meeting of ranks that no variable names.

`init_process_group("minidist")` asks torch's *rendezvous* for a store, the rank and how many there
are. torch reads RANK and WORLD_SIZE for that. A simulated rank, and a process that mpirun started
without them, ask us instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from minidist.full.comm.agree import debug_mode
from minidist.full.comm.communicator import Communicator
from minidist.full.comm.start import init, under_mpirun
from minidist.torch_backend.any_name import NAME, take_any_name
from minidist.torch_backend.backend import MinidistGroup, kernels
from minidist.torch_backend.operators import Operators
from minidist.torch_backend.ranks import RANKS, Rank
from minidist.torch_backend.work import Working, collecting, keeping, waiting


def register() -> None:
    """Make the backend known to torch. It may be called more than once."""
    if NAME in dist.Backend.backend_list:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "meta"])
    take_any_name()
    kernels()
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    handlers["env"] = _Rendezvous(handlers["env"], of_here)
    for named in ("tcp", "file"):
        handlers[named] = _Rendezvous(handlers[named], RANKS.simulated)
    mesh: Any = DeviceMesh
    mesh._thread_id = property(rank_that_plans, lambda mesh, thread: None)
    profile_one_at_a_time(torch.autograd.profiler)
    never_compile(MinidistGroup)
    never_compile(Operators)
    never_compile(Working)
    functions: Any = torch._C
    functions._collect_all = collecting(functions._collect_all)
    functions.wait = waiting(functions.wait)
    reducer: Any = torch._C._distributed_c10d.Reducer
    reducer._set_forward_pass_work_handle = keeping(reducer._set_forward_pass_work_handle)


def never_compile(kind: type) -> None:
    """Have torch.compile leave the methods, and all that they call, as they are. Where a compiled
    program calls one, the compiler would look into it as if it were a part of the program.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            frames.set_code_exec_strategy(method.__code__, skip)


def rank_that_plans(mesh: DeviceMesh) -> int | None:
    """Return a part of a mesh's hash, by which torch keeps plans of what a DTensor sends: they
    depend on the rank, and torch has this part for ranks that are threads.
    """
    rank = RANKS.simulated()
    return None if rank is None else rank.comm.rank


def profile_one_at_a_time(profiler: Any) -> None:
    """Have torch's profiler refuse a second simulated rank: both would end in a segmentation
    fault.
    """
    prepare = profiler._prepare_profiler

    def begin(*args: Any, **options: Any) -> Any:
        if profiler._is_profiler_enabled and RANKS.simulated() is not None:
            raise RuntimeError(
                "torch's profiler, of which a process has one, is in use by another simulated "
                "rank: let one rank profile, or take processes, python -m minidist launch"
            )
        profiler._set_is_profiler_enabled(True)  # now, and not when it starts, after a moment
        return prepare(*args, **options)

    profiler._prepare_profiler = begin


def as_users_want(comm: Communicator) -> Communicator:
    """Have the ranks compare their calls, unless MINIDIST_DEBUG=0: these programs are not ours."""
    comm.debug = debug_mode(None, otherwise=True)
    return comm


@contextmanager
def on(comm: Communicator) -> Iterator[None]:
    """Have `init_process_group("minidist")` in the body take the ranks of `comm`. Collective.

    For a communicator that exists already, in a process of its own. In the body its ranks compare
    their calls, unless MINIDIST_DEBUG=0.
    """
    before = comm.debug
    RANKS.adopt(Rank(as_users_want(comm), shared_store(comm)))
    try:
        yield
    finally:
        RANKS.adopt(None)
        comm.debug = before


def shared_store(comm: Communicator) -> Store:
    """Return a store that all ranks of `comm` share: rank 0 serves it. Collective."""
    if comm.size == 1:
        return HashStore()
    host = "localhost" if len(comm.node) == comm.size else _host_name()
    served = TCPStore(host, 0, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
    host, port = comm.all_gather_object((host, 0 if served is None else served.port))[0]
    return served or TCPStore(host, port, is_master=False, wait_for_workers=False)


class _Rendezvous:
    """torch's meeting by variables, an address or a file, and ours for ranks that have met: those
    that `find` knows.
    """

    def __init__(self, others: Callable[..., Any], find: Callable[[], Rank | None]) -> None:
        self.others, self.find = others, find

    def __call__(self, url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
        rank = self.find()
        if rank is None:
            yield from self.others(url, **options)
            return
        for name, true in (("rank", rank.comm.rank), ("world_size", rank.comm.size)):
            said = parse_qs(urlsplit(url).query).get(name)
            if said is not None and int(said[0]) != true:
                raise ValueError(
                    f"init_process_group: {name}={said[0]}, but it is {true}: leave {name} out"
                )
        yield rank.next_store(), rank.comm.rank, rank.comm.size


def of_here() -> Rank | None:
    """Return the rank that this thread is, or this process of mpirun's."""
    rank = RANKS.here()
    return RANKS.of_process(_of_mpirun) if rank is None and under_mpirun() else rank


def _of_mpirun() -> Rank:
    comm = as_users_want(init())
    return Rank(comm, shared_store(comm))


def _create(options: Any, more: Any) -> MinidistGroup:
    """Make a process group; torch calls this on its members alone. `more` are a call's
    `pg_options`.
    """
    if more is not None:
        raise ValueError(
            f"pg_options={more!r}: minidist's groups have no options: leave pg_options out"
        )
    rank = of_here()
    if rank is None:
        raise RuntimeError(
            "init_process_group('minidist') needs ranks: simulate them, minidist.run(program, "
            "ranks=4, torch=True), start the program with mpirun, or give it a communicator, "
            "with minidist.torch_backend.on(comm)"
        )
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    if rank.comm.rank != members[options.group_rank]:
        raise ValueError(
            f"this is rank {rank.comm.rank} of {rank.comm.size}, not rank {options.group_rank} of "
            f"{options.group_size}: leave rank= and world_size= out"
        )
    return MinidistGroup(rank.group(members), str(options.group_id))


def _host_name() -> str:
    import socket

    return socket.gethostname()
