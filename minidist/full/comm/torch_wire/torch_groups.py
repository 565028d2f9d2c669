"""Starting torch.distributed, and making groups of it in which only the members take part."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from minidist.full.comm.errors import LaunchError
from minidist.full.comm.torch_wire.gpus import number_in, own_gpu
from minidist.full.comm.torch_wire.torch_request import explaining

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def new_group(
    addresses: tuple[int, ...], timeout: timedelta, backend: str = "gloo"
) -> dist.ProcessGroup:
    """Return a group of these ranks. Collective over them alone."""
    group: dist.ProcessGroup = dist.new_group(
        list(addresses), timeout, backend, use_local_synchronization=True
    )
    return group


def have_equally_many_groups(parent: dist.ProcessGroup, rank: int) -> None:
    """Make groups of this rank alone until all ranks of `parent` have as many as each other.
    Collective.

    torch names a new group by its ranks and by the number of groups that this process has. Ranks
    with unequal numbers, as after groups in which only some took part, would wait for each other
    under different names.
    """
    counts = gather_answers(parent, rank, len(dist.distributed_c10d._world.pg_names))
    for _ in range(max(counts) - counts[rank]):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def nccl_group(
    parent: dist.ProcessGroup,
    everyones: list[list[int]],
    addresses: tuple[int, ...],
    timeout: timedelta,
) -> dist.ProcessGroup:
    """Return this rank's part of `parent`. If torch is bound to a device, all ranks split the
    parent at once.
    """
    if everyone().bound_device_id is None:
        return new_group(addresses, timeout, "nccl")
    parts = [sorted(dist.get_group_rank(parent, address) for address in part) for part in everyones]
    group = dist.split_group(parent, parts, timeout)
    assert group is not None, "each rank is in one part"
    return group


def abort_nccl() -> None:
    """End all operations of NCCL that this process has begun; what they should have brought is
    rubbish. Its groups cannot be used any more.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if dist.get_backend(group) == "nccl":
            group._get_backend(torch.device("cuda")).abort()


def everyone() -> dist.ProcessGroup:
    """Return torch.distributed's group of all ranks."""
    return dist.distributed_c10d._get_default_group()


def gather_answers(group: dist.ProcessGroup, rank: int, answer: Any) -> list[Any]:
    """Return every rank's answer in the order of `rank`, which may differ from torch's."""
    answers: list[Any] = [None] * group.size()
    with explaining("another rank"):
        dist.all_gather_object(answers, (rank, answer), group)
    return [answer for _, answer in sorted(answers, key=lambda pair: int(pair[0]))]


def own_store(group: dist.ProcessGroup, rank: int) -> tuple[Store, Store]:
    """Return a part of the job's store for this wrapping of `group`, on its own connection, and
    torch's own store.
    """
    store = dist.distributed_c10d._get_default_store()
    connection = store.clone()  # type: ignore[attr-defined]
    place = f"minidist/{group.group_name}"
    # the same number on all ranks, if all wrap equally often
    wrapping = connection.add(f"{place}/rank {rank}", 1)
    return dist.PrefixStore(f"{place}/{wrapping}", connection), store  # type: ignore[attr-defined]


def initialize(timeout: timedelta) -> dist.ProcessGroup:
    """Start torch.distributed as the launcher's variables say, unless it has been; return the group
    of all ranks.

    Raises
    ------
    LaunchError
        If this rank does not meet the others in time.
    """
    if not dist.is_initialized():
        rank, size = number_in("RANK", "SLURM_PROCID"), number_in("WORLD_SIZE", "SLURM_NTASKS")
        os.environ.setdefault("MASTER_PORT", "29500")  # srun sets none
        gpu = own_gpu()
        device = None if gpu is None else torch.device("cuda", gpu)
        if device is not None:
            torch.cuda.set_device(device)
        backend = "nccl" if device is not None else "gloo"
        with _meeting(rank, size):
            dist.init_process_group(
                backend,
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=device,
                store=store_of_restart(size, timeout),
            )
        atexit.register(_close)
    return everyone()


@contextlib.contextmanager
def _meeting(rank: int, size: int) -> Iterator[None]:
    """Say in one sentence why this rank did not meet the others, and what to do."""
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).splitlines()[0]
        fix = f"start all {size} ranks at about the same time, with the same MASTER_ADDR and port"
        if "EADDRINUSE" in reason:
            fix = "another program listens there: set MASTER_PORT to a port that is free"
        elif rank > 0 and isinstance(error, dist.DistNetworkError):
            fix = f"{fix}, at which rank 0 can be reached from here"
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise LaunchError(
            f"rank {rank} of {size} did not meet the others at {place} ({reason}): {fix}"
        ) from None


def store_of_restart(size: int, timeout: timedelta) -> Store | None:
    """Return a part of torchrun's store for ranks that it has restarted; None: as torch does.

    With a fixed address torchrun has one store for all its starts. In it the ranks of the start
    before have left where they listened, and gloo would call there.
    """
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if count == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*place, size, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    return dist.PrefixStore(f"restart {count}", store)  # type: ignore[attr-defined]


def _close() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
