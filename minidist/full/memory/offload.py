"""Offloading: the optimizer's state lives in CPU memory or on a disk, and is updated chunk by
chunk.

    main      │ update chunk 0 ──────│ update chunk 1 ──────│ update chunk 2 ...
    worker    │ fetch 1 ─────────────│ keep 0 │ fetch 2 ────│ keep 1 │ fetch 3 ...

    fetch     gradients from the device to the CPU; state from its file into memory
    keep      parameters from the CPU to the device; state from memory into its file

AdamW keeps two float32 numbers for each weight. A weight of 16 bits has a float32 master too, so
its state takes 12 bytes beside its own two. With `to="cpu"` the state lies in host memory: a
gradient travels down, the update runs on the CPU, and a parameter travels up (Ren et al. 2021,
ZeRO-Offload, section 4). With `to=folder` the state lies in files, and memory holds two chunks of
it: one is updated while the other travels. (Rajbhandari et al. 2021, ZeRO-Infinity, section 5.)

The files are mapped into memory and have no name: each vanishes with its tensor, or with the
process, however that ends. Disk space is claimed when a file is made: a mapped file that meets a
full disk later would end the process with SIGBUS.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.optimizer import ParamsT

from minidist.full.precision.masters import Chunk, MasterWeights, State, Visit, wide


def mapped(
    shape: tuple[int, ...], dtype: torch.dtype, folder: Path, name: str = "tensor"
) -> Tensor:
    """Return a tensor of zeros whose memory is a file in `folder`.

    The system reads pages when they are touched, and writes them back when it needs the memory. The
    file loses its name at once, so no one has to remove it: it lives as long as the tensor or a
    view of it.

    Raises
    ------
    OSError
        If the disk has no room, or the folder does not exist. No space is then taken.
    """
    size = prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    free = shutil.disk_usage(folder).free
    descriptor, path = tempfile.mkstemp(prefix=f"{name}.", dir=folder)
    try:
        take_room(descriptor, size, free)
        return torch.from_file(path, shared=True, size=prod(shape), dtype=dtype).view(shape)
    except OSError as error:
        raise OSError(
            error.errno, f"{name} needs {size:,} bytes in {folder}, where {free:,} are free"
        ) from None
    finally:
        os.close(descriptor)
        os.unlink(path)


def take_room(descriptor: int, size: int, free: int) -> None:
    """Give an open file its size, of disk space that is then its own.

    Not every system can claim space (macOS cannot): there, the file is refused if there is not
    enough at this moment.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    elif size > free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    else:
        os.ftruncate(descriptor, size)


class OffloadedOptimizer(MasterWeights):
    """`MasterWeights` with masters and state in host memory or in files. The results are the same
    bits.

    Parameters
    ----------
    params, optimizer, chunk_bytes, **options
        As for `MasterWeights`. Parameters may be on any device; the inner optimizer gets tensors on
        the CPU.
    to : "cpu" or Path
        Where the state lives: in host memory, or in files in a folder. Scalars, such as `step`,
        stay in memory.

    Raises
    ------
    OSError
        If the folder has no room for the state of all trained parameters. `step` raises it too,
        when parameters were unfrozen since and there is no room for theirs. No parameter and no
        state is then changed.
    """

    elementwise = True  # as for `MasterWeights`
    place = torch.device("cpu")

    def __init__(
        self,
        params: ParamsT,
        optimizer: Callable[..., Any] = AdamW,
        to: Literal["cpu"] | Path = "cpu",
        **options: Any,
    ) -> None:
        self.folder = None if to == "cpu" else Path(to)
        self.files: dict[Tensor, dict[str, Tensor]] = {}
        self.worker = ThreadPoolExecutor(1, "offload", torch.set_grad_enabled, (False,))
        super().__init__(params, optimizer, **options)
        self._make_room(
            p for group in self.param_groups for p in group["params"] if p.requires_grad
        )

    def _update(self, chunks: list[Chunk]) -> None:
        """Fetch, advance and keep: while one chunk advances, the worker keeps the last and fetches
        the next.
        """
        self._make_room(parameter for _, parameters in chunks for parameter in parameters)
        for device in {parameters[0].device for _, parameters in chunks if parameters[0].is_cuda}:
            # the gradients were made on another stream than the worker's
            torch.cuda.synchronize(device)
        kept: list[Future[None]] = []
        coming = [self.worker.submit(self._fetch, *chunk) for chunk in chunks[:1]]
        try:
            for number in range(len(chunks)):
                visit = coming.pop().result()
                coming += [
                    self.worker.submit(self._fetch, *chunk)
                    for chunk in chunks[number + 1 : number + 2]
                ]
                self._advance(visit)
                kept.append(self.worker.submit(self._keep, visit))
        finally:
            # the worker is then done with all jobs before this one
            self.worker.submit(lambda: None).result()
        for job in kept:
            job.result()

    def _widened(self, tensor: Tensor) -> Tensor:
        """Copy to the CPU, and widen there. A GPU writes fast only to pinned memory."""
        if not tensor.is_cuda:
            return super()._widened(tensor)
        return (
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            .copy_(tensor)
            .to(wide(tensor))
        )

    def _master(self, parameter: nn.Parameter, master: Tensor | None) -> nn.Parameter:
        twin = super()._master(parameter, master)
        if parameter.is_cuda:
            twin.data = twin.data.pin_memory()  # no copy if it is already pinned
        return twin

    def state_of(self, parameter: Tensor) -> State:
        """Return the state of a parameter, in memory."""
        files = self.files.get(parameter, {})
        state = super().state_of(parameter)
        return {name: value.clone() if name in files else value for name, value in state.items()}

    def _store(self, parameter: Tensor, state: State) -> None:
        files = self.files.get(parameter, {})
        kept = {
            name: files[name].copy_(value) if name in files else value
            for name, value in state.items()
        }
        super()._store(parameter, kept)

    def _make_room(self, parameters: Iterable[Tensor]) -> None:
        """Make files for the parameters that have none. A trial step on zeros finds their sizes."""
        if self.folder is None:
            return
        new = set(parameters) - self.files.keys()
        members = (
            (group, parameter) for group in self.param_groups for parameter in group["params"]
        )
        sizes = {
            parameter: self._trial(group, parameter)
            for group, parameter in members
            if parameter in new
        }
        needed = sum(like.nbytes for named in sizes.values() for like in named.values())
        free = shutil.disk_usage(self.folder).free
        files: dict[Tensor, dict[str, Tensor]] = {parameter: {} for parameter in sizes}
        try:
            for number, (parameter, named) in enumerate(sizes.items(), len(self.files)):
                for name, like in named.items():
                    files[parameter][name] = mapped(
                        like.shape, like.dtype, self.folder, f"{number}.{name}"
                    )
        except OSError as error:
            files.clear()  # returns the space
            reason = (
                f"the optimizer's state needs {needed:,} bytes in {self.folder}, where {free:,} "
                "are free"
            )
            raise OSError(
                error.errno, f"{reason}: choose another folder, or train fewer parameters"
            ) from None
        self.files |= files

    def _trial(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """Return the state that the optimizer will have for a parameter, as meta tensors."""
        twin = nn.Parameter(torch.zeros(parameter.shape, dtype=wide(parameter)))
        twin.grad = torch.zeros_like(twin)
        visit = Visit(group, [twin], [twin], [{}])
        self._advance(visit)
        (state,) = visit.states
        if not self._is_own_master(parameter):
            state["master"] = twin.detach()
        return {
            name: value.to("meta")
            for name, value in state.items()
            if isinstance(value, Tensor) and value.dim()
        }
