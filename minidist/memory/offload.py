"""Offloading: the optimizer's state lives in CPU memory or on a disk, and visits a chunk at a time.

    main      │ update chunk 0 ──────│ update chunk 1 ──────│ update chunk 2 ...
    worker    │ fetch 1 ─────────────│ keep 0 │ fetch 2 ────│ keep 1 │ fetch 3 ...

    fetch     gradients down from the device; state from its file into memory
    keep      parameters up to the device; state from memory into its file

AdamW keeps two numbers for each weight, and a third, the float32 master, if the weight has 16 bits: 12 bytes beside 2.
With `to="cpu"` they lie in host memory: a gradient travels down and a parameter up, and the update runs on the CPU (Ren
et al. 2021, ZeRO-Offload, section 4). With `to=folder` they lie in files, and memory holds two chunks of state: one
that is updated and one that comes or goes. (Rajbhandari et al. 2021, ZeRO-Infinity, section 5.)

Files are mapped into memory and have no name: they vanish with the tensor or with the process, whatever ends it. Their
space is claimed when they are made. A mapped file that meets a full disk later would end the process with SIGBUS.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from minidist.comm.job.background import BackgroundThread
from minidist.memory.precision.masters import MIB, Chunk, MasterWeights, State, Visit, wide


def mapped(shape: tuple[int, ...], dtype: torch.dtype, folder: Path, name: str = "tensor") -> Tensor:
    """Return a tensor of zeros whose memory is a file in `folder`, as the shards of ZeRO-3 may be.

    The system reads pages when they are touched and writes them back when it needs the memory. The file loses its name
    at once, so nothing is to be removed later: it lives as long as the tensor or a view of it.

    Raises
    ------
    OSError
        If the disk has no room, or the folder is not there. No space is taken then.
    """
    size = prod(shape) * dtype.itemsize
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    free = shutil.disk_usage(folder).free
    descriptor, path = tempfile.mkstemp(prefix=f"{name}.", dir=folder)
    try:
        os.posix_fallocate(descriptor, 0, size)
        return torch.from_file(path, shared=True, size=prod(shape), dtype=dtype).view(shape)
    except OSError as error:
        raise OSError(error.errno, f"{name} needs {size:,} bytes in {folder}, where {free:,} are free") from None
    finally:
        os.close(descriptor)
        os.unlink(path)


class OffloadedOptimizer(MasterWeights):
    """Any optimizer that treats each parameter for itself, with its state elsewhere.

    Parameters
    ----------
    params, optimizer, chunk_bytes, **options
        As for `MasterWeights`. Parameters may be on any device; the optimizer is given tensors on the CPU.
    to : "cpu" or Path
        Where the state lives: in host memory, or in files in a folder.

    Raises
    ------
    OSError
        If the folder has no room for the state of all trained parameters; a later `step` claims the room for those that
        were unfrozen since. No parameter and no state has been changed then.

    The numbers are those of `MasterWeights`, bit for bit. A parameter on a GPU, too, is updated as a float32 master on
    the CPU. Tensors without dimensions, such as `step`, stay in memory.
    """

    elementwise = True  # as for `MasterWeights`

    def __init__(
        self,
        params: ParamsT,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        to: Literal["cpu"] | Path = "cpu",
        chunk_bytes: int = 16 * MIB,
        **options: Any,
    ) -> None:
        self.folder = None if to == "cpu" else Path(to)
        self.files: dict[Tensor, dict[str, Tensor]] = {}
        self.worker = Worker()
        super().__init__(params, optimizer, chunk_bytes=chunk_bytes, **options)
        self._claim_files(lambda parameter: parameter.requires_grad)

    def close(self) -> None:
        """Forget the state, and give its memory and files back."""
        self.state.clear()
        self.files.clear()

    def _update(self, chunks: list[Chunk]) -> None:
        """Fetch, advance and keep; while one chunk advances, the worker keeps the last and fetches the next."""
        self._claim_files(lambda parameter: parameter.grad is not None)
        for device in {parameters[0].device for _, parameters in chunks if parameters[0].is_cuda}:
            torch.cuda.synchronize(device)  # the worker copies on another stream than the one that made the gradients
        kept: list[Future[None]] = []
        coming = [self.worker.submit(self._fetch, *chunk) for chunk in chunks[:1]]
        try:
            for number in range(len(chunks)):
                visit = coming.pop().result()
                coming += [self.worker.submit(self._fetch, *chunk) for chunk in chunks[number + 1 : number + 2]]
                self._advance(visit)
                kept.append(self.worker.submit(self._keep, visit))
        finally:
            self.worker.submit(lambda: None).result()  # all before it is done then, and forgotten
        for job in kept:
            job.result()

    def _is_own_master(self, parameter: Tensor) -> bool:
        return parameter.device.type == "cpu" and super()._is_own_master(parameter)

    def _widened(self, tensor: Tensor) -> Tensor:
        """Copy to the CPU, and widen there. A GPU writes fast only to memory that is pinned."""
        if not tensor.is_cuda:
            return tensor.to("cpu", wide(tensor), copy=True)
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor).to(wide(tensor))

    def _master(self, parameter: nn.Parameter, master: Tensor | None) -> nn.Parameter:
        twin = super()._master(parameter, master)
        if parameter.is_cuda:
            twin.data = twin.data.pin_memory()  # no copy if it is pinned already
        return twin

    def _place(self, parameter: Tensor) -> torch.device:
        return torch.device("cpu")

    def _expect(self, parameters: dict[nn.Parameter, State]) -> None:
        self._claim_files(lambda parameter: parameter in parameters)

    def state_of(self, parameter: Tensor) -> State:
        """Return what is kept of a parameter, in memory."""
        files = self.files.get(parameter, {})
        state = super().state_of(parameter)
        return {name: value.clone() if name in files else value for name, value in state.items()}

    def _store(self, parameter: Tensor, state: State) -> None:
        files = self.files.get(parameter, {})
        kept = {name: files[name].copy_(value) if name in files else value for name, value in state.items()}
        super()._store(parameter, kept)

    def _claim_files(self, wanted: Callable[[Tensor], bool]) -> None:
        """Make the files for parameters that have none, of the sizes that a trial step on zeros shows."""
        if self.folder is None:
            return
        sizes = {
            parameter: self._trial(group, parameter)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter not in self.files and wanted(parameter)
        }
        needed = sum(like.nbytes for named in sizes.values() for like in named.values())
        free = shutil.disk_usage(self.folder).free
        files: dict[Tensor, dict[str, Tensor]] = {parameter: {} for parameter in sizes}
        try:
            for number, (parameter, named) in enumerate(sizes.items(), len(self.files)):
                for name, like in named.items():
                    files[parameter][name] = mapped(like.shape, like.dtype, self.folder, f"{number}.{name}")
        except OSError as error:
            files.clear()  # gives the space back
            reason = f"the optimizer's state needs {needed:,} bytes in {self.folder}, where {free:,} are free"
            raise OSError(error.errno, f"{reason}: choose another folder, or train fewer parameters") from None
        self.files |= files

    def _trial(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """Return the state that the optimizer will have for a parameter, as shapes without memory."""
        twin = nn.Parameter(torch.zeros(parameter.shape, dtype=wide(parameter)))
        twin.grad = torch.zeros_like(twin)
        visit = Visit(group, [twin], [twin], [{}])
        self._advance(visit)
        (state,) = visit.states
        if not self._is_own_master(parameter):
            state["master"] = twin.detach()
        return {name: value.to("meta") for name, value in state.items() if isinstance(value, Tensor) and value.dim()}


class Worker:
    """One daemon thread that does one job after the other; it ends with the last reference to this object."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        BackgroundThread(_serve, self.jobs, name="offload").start()
        weakref.finalize(self, self.jobs.put, None)

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        """Do `work(*args)` after what was submitted before."""
        future: Future[Any] = Future()

        def job() -> None:
            try:
                future.set_result(work(*args))
            except BaseException as error:
                future.set_exception(error)

        self.jobs.put(job)
        return future


@torch.no_grad()
def _serve(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    thread = threading.current_thread()
    assert isinstance(thread, BackgroundThread)
    while (job := jobs.get()) is not None:
        with thread.working():
            job()
            del job  # and the tensors that it holds
